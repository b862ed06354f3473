"""The update that the moments of a parameter stand for, before the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from daypack.checkpoint.moments import UNCOUNTED
from daypack.geometry import CHUNK_ELEMENTS, Chunk, accumulator, read
from daypack.inspection.forms import AMSGRAD, Form
from daypack.rules.base import Elements, Hyper, Norms


def update_rms(form: Form, weights: Tensor | None) -> tuple[float | None, str]:
    """Return the RMS, over the parameter, of the update that a gradient equal to the running mean would make, without
    the learning rate and without decoupled decay. With Adam and AdamW this is the last update made.

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
    if all(at.moment.squares for at in form.kept.values()):
        return None, "there is no first moment to compute an update from"
    if form.rule.measured is not None and weights is None and form.projection is None:
        return None, "an update depends on the weights; give them with --weights"
    group = {"maximize": False, "nesterov": False, "dampening": 0.0, **form.options}
    try:
        hyper = form.rule.at(group, step)
    except KeyError as error:
        return None, f"its group has no option {error}"
    except (TypeError, ValueError, RuntimeError) as error:
        return None, f"an option of its group is damaged ({error})"
    if "dampening" in form.rule.options and float(group["dampening"]) == 1:
        return None, "with a dampening of 1 no gradient enters"
    total = _squared_norm(form, replace(hyper, maximize=False), weights)
    scale = float(group["scale"]) if form.projection else 1.0
    return scale * (total / torch.Size(form.entry.shape).numel()) ** 0.5, ""


def _squared_norm(form: Form, hyper: Hyper, weights: Tensor | None) -> float:
    norms, rule = None, form.rule
    if rule.measured is not None:
        measured = sum(_square(rule.measured(x)) for _, x in _elements(form, hyper, weights, None))
        norms = Norms(norm(weights) if weights is not None and not form.projection else 0.0, measured**0.5, _size(form))
    found = ((chunk, rule.direction(x)) for chunk, x in _elements(form, hyper, weights, norms))
    if rule.whole is None:
        return sum(_square(direction) for _, direction in found)
    matrices = torch.zeros(form.view.view3, dtype=accumulator(form.entry.dtype))
    for chunk, direction in found:
        matrices[chunk] = direction
    return sum(_square(rule.whole(matrix, hyper)) for matrix in matrices)


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _size(form: Form) -> int:
    return torch.Size(form.view.shape).numel()


def _elements(
    form: Form, hyper: Hyper, weights: Tensor | None, norms: Norms | None
) -> Iterator[tuple[Chunk, Elements]]:
    """Yield what the rule sees, a chunk at a time. Low-rank state is applied to a stand-in of zeros."""
    numbers = {name: form.numbers(name) for name in form.kept}
    amsgrad = form.state.get(AMSGRAD)
    first = next(name for name, at in form.kept.items() if not at.moment.squares)
    for chunk in numbers[first].chunks(lcm(*(each.align for each in numbers.values()))):
        stored = {name: each.read(chunk) for name, each in numbers.items()}
        like = stored[first]
        if isinstance(amsgrad, Tensor):
            stored["exp_avg_sq"] = read(amsgrad, form.view, chunk).to(like.dtype)
        at = weights if not form.projection else None
        p = torch.zeros_like(like) if at is None else read(at, form.view, chunk).to(accumulator(form.entry.dtype))
        x = Elements(form.rule, hyper, p, like, stored, stored, norms)
        if form.rule.steady is not None:
            x = Elements(form.rule, hyper, p, form.rule.steady(x), stored, stored, norms)
        yield chunk, x


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm of the finite values, in fp64, without copying the whole tensor."""
    return math.sqrt(sum(float(part.square().sum()) for part in map(finite, pieces(tensor))))


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Return the elements in order, a chunk of memory at a time."""
    flat = tensor.detach().reshape(-1)
    return (flat[start : start + CHUNK_ELEMENTS] for start in range(0, flat.numel(), CHUNK_ELEMENTS))


def finite(part: Tensor) -> Tensor:
    """Return ``part`` in fp64, with 0 for values that are not finite."""
    return part.double().nan_to_num(0.0, 0.0, 0.0)


def learning_rate(options: Mapping[str, Any]) -> float | None:
    """Return ``lr`` of a group, which may be a tensor; None if it is no number."""
    lr = options.get("lr")
    return float(lr) if isinstance(lr, (int, float)) or (isinstance(lr, Tensor) and lr.numel() == 1) else None
