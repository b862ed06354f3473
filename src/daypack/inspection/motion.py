"""The update that the moments of a parameter stand for, before the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from daypack.checkpoint.moments import UNCOUNTED
from daypack.formats.base import CHUNK_ELEMENTS, accumulator, read
from daypack.inspection.forms import AMSGRAD, Form
from daypack.update import Elements, Hyper, Norms


def _mean(m: Tensor, v: Tensor | None, hyper: Hyper) -> Tensor:
    return m


def _momentum(m: Tensor, v: Tensor | None, hyper: Hyper) -> Tensor:
    """``m = mu m + (1 - dampening) g``, but ``m = g`` at the first step."""
    return m if hyper.step == 1 else m * ((1 - hyper.beta1) / (1 - float(hyper.option("dampening"))))


def _normalised(m: Tensor, v: Tensor | None, hyper: Hyper) -> Tensor:
    """Adafactor averages gradients over the root of the second moment."""
    return m * cast(Tensor, v).sqrt().clamp_min(torch.finfo(m.dtype).eps)


#: By rule: the gradient that leaves the first moment as it is. Stepped by the rule it gives the update of that moment.
STEADY: dict[str, Callable[[Tensor, Tensor | None, Hyper], Tensor]] = {
    **dict.fromkeys(("adamw", "adam", "lamb", "lion"), _mean),
    "sgd": _momentum,
    "adafactor": _normalised,
}


def update_rms(form: Form, weights: Tensor | None) -> tuple[float | None, str]:
    """RMS over the parameter of the update that a gradient equal to the running mean would make, without the learning
    rate and without decoupled decay. With Adam and AdamW it is the last update that was made.

    Args:
        weights: the parameter, shaped like it.

    Returns:
        The RMS, or None and why it cannot be told.
    """
    step = form.step if form.counts else UNCOUNTED
    if not step or not form.entry.state or 0 in form.entry.shape:
        return None, ""
    if form.faults:
        return None, ""
    if "exp_avg" not in form.kept:
        return None, "no first moment, by which an update could be told"
    if form.rule.measured is not None and weights is None and form.projection is None:
        return None, "an update depends on the weights; give them with --weights"
    group = {"maximize": False, "nesterov": False, "dampening": 0.0, **form.options}
    try:
        hyper = form.rule.at(group, step)
    except KeyError as error:
        return None, f"its group has no option {error}"
    except (TypeError, ValueError, RuntimeError) as error:
        return None, f"an option of its group is damaged ({error})"
    if form.rule.name == "sgd" and float(group["dampening"]) == 1:
        return None, "with a dampening of 1 no gradient enters"
    total = _squared_norm(form, replace(hyper, maximize=False), weights)
    scale = float(group["scale"]) if form.projection else 1.0
    return scale * (total / torch.Size(form.entry.shape).numel()) ** 0.5, ""


def _squared_norm(form: Form, hyper: Hyper, weights: Tensor | None) -> float:
    norms, rule = None, form.rule
    if rule.measured is not None:
        measured = sum(float(rule.measured(x, hyper).double().square().sum()) for x in _elements(form, hyper, weights))
        norms = Norms(norm(weights) if weights is not None and not form.projection else 0.0, measured**0.5, _size(form))
    return sum(
        float(rule.direction(x, hyper, norms)[0].double().square().sum()) for x in _elements(form, hyper, weights)
    )


def _size(form: Form) -> int:
    return torch.Size(form.view.shape).numel()


def _elements(form: Form, hyper: Hyper, weights: Tensor | None) -> Iterator[Elements]:
    """What the rule sees, a chunk at a time. Low-rank state steps a stand-in of zeros."""
    first = form.numbers("exp_avg")
    second = form.numbers("exp_avg_sq") if "exp_avg_sq" in form.kept else None
    amsgrad = form.state.get(AMSGRAD)
    for chunk in first.chunks(second.align if second else 1):
        m = first.read(chunk)
        v = second.read(chunk) if second else None
        if isinstance(amsgrad, Tensor):
            v = read(amsgrad, form.view, chunk).to(m.dtype)
        at = weights if not form.projection else None
        p = torch.zeros_like(m) if at is None else read(at, form.view, chunk).to(accumulator(form.entry.dtype))
        yield Elements(p, STEADY[form.rule.name](m, v, hyper), m, v)


def norm(tensor: Tensor) -> float:
    """Euclidean norm of finite values, in fp64, a chunk of memory at a time."""
    return math.sqrt(sum(float(part.square().sum()) for part in map(finite, pieces(tensor))))


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The elements, a chunk of memory at a time."""
    flat = tensor.detach().reshape(-1)
    return (flat[start : start + CHUNK_ELEMENTS] for start in range(0, flat.numel(), CHUNK_ELEMENTS))


def finite(part: Tensor) -> Tensor:
    """In fp64, 0 for what is not finite."""
    return part.double().nan_to_num(0.0, 0.0, 0.0)


def learning_rate(options: Mapping[str, Any]) -> float | None:
    """``lr`` of a group, which may be a tensor; None if it is no number."""
    lr = options.get("lr")
    return float(lr) if isinstance(lr, (int, float)) or (isinstance(lr, Tensor) and lr.numel() == 1) else None
