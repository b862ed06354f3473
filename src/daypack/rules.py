"""Update rules: pure functions on fp32 (fp64) tensors that read like their papers. They know nothing of storage.

A rule's ``hyper`` reads the options of a group, its ``direction`` turns old first moment, new second moment and
gradient into what is subtracted, times the learning rate. See `daypack.update.Rule` and `daypack.update.Elements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from daypack.update import Elements, Hyper, Norms, Rule


def _decoupled(group: Mapping[str, Any], step: int) -> Hyper:
    """AdamW's options; decay shrinks the parameter by ``lr * weight_decay``."""
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return Hyper(step, lr, beta1, beta2, float(group["eps"]), decay, group["maximize"], shrink=lr * decay)


def _coupled(group: Mapping[str, Any], step: int) -> Hyper:
    """Adam's options; decay is part of the gradient."""
    beta1, beta2 = map(float, group["betas"])
    decay = float(group["weight_decay"])
    return Hyper(step, float(group["lr"]), beta1, beta2, float(group["eps"]), decay, group["maximize"], coupled=decay)


def _adamw(x: Elements, hyper: Hyper, _: Norms | None = None) -> tuple[Tensor, Tensor]:
    """``(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``."""
    m = torch.lerp(cast(Tensor, x.m), x.g, 1 - hyper.beta1)
    denominator = (cast(Tensor, x.v) / hyper.bias_correction2).sqrt_().add_(hyper.eps)
    return (m / hyper.bias_correction1).div_(denominator), m


#: Loshchilov & Hutter 2017.
ADAMW = Rule("adamw", _adamw, _decoupled)
#: Kingma & Ba 2014, weight decay as an L2 penalty.
ADAM = Rule("adam", _adamw, _coupled)


def _momentum(group: Mapping[str, Any], step: int) -> Hyper:
    """SGD's options: ``beta1`` is the momentum; decay is part of the gradient."""
    decay, momentum = float(group["weight_decay"]), float(group["momentum"])
    return Hyper(
        step, float(group["lr"]), momentum, weight_decay=decay, maximize=group["maximize"], coupled=decay, options=group
    )


def _sgd(x: Elements, hyper: Hyper, _: Norms | None) -> tuple[Tensor, Tensor | None]:
    """``m = momentum m + (1 - dampening) g``, ``m = g`` at the first step; direction ``m``, or ``g + momentum m``."""
    if x.m is None:
        return x.g, None
    m = x.g if hyper.step == 1 else (x.m * hyper.beta1).add_(x.g, alpha=1 - float(hyper.option("dampening")))
    return x.g.add(m, alpha=hyper.beta1) if hyper.option("nesterov") else m, m


#: Polyak's and Nesterov's momentum as `torch.optim.SGD` has them.
SGD = Rule("sgd", _sgd, _momentum)


def _lion_options(group: Mapping[str, Any], step: int) -> Hyper:
    """Lion's options; decay shrinks the parameter by ``lr * weight_decay``."""
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return Hyper(step, lr, beta1, beta2, weight_decay=decay, maximize=group["maximize"], shrink=lr * decay)


def _lion(x: Elements, hyper: Hyper, _: Norms | None) -> tuple[Tensor, Tensor]:
    """``sign(b1 m + (1 - b1) g)``; then ``m = b2 m + (1 - b2) g``."""
    m = cast(Tensor, x.m)
    return torch.lerp(m, x.g, 1 - hyper.beta1).sign_(), torch.lerp(m, x.g, 1 - hyper.beta2)


#: Chen et al. 2023, arXiv 2302.06675.
LION = Rule("lion", _lion, _lion_options)


def _layerwise(group: Mapping[str, Any], step: int) -> Hyper:
    """AdamW's options; decay is part of the direction, so that the trust ratio scales it too."""
    beta1, beta2 = map(float, group["betas"])
    numbers = float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"])
    return Hyper(step, *numbers, group["maximize"], options=group)


def _decayed_adamw(x: Elements, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """AdamW's direction plus ``weight_decay * p``."""
    direction, m = _adamw(x, hyper)
    return direction.add_(x.p, alpha=hyper.weight_decay), m


def _lamb(x: Elements, hyper: Hyper, norms: Norms | None) -> tuple[Tensor, Tensor]:
    """The decayed direction ``u``, times ``|p| / |u|``; times 1 if either norm is 0 or the group is exempt."""
    norms = cast(Norms, norms)
    direction, m = _decayed_adamw(x, hyper)
    if norms.param > 0 and norms.measured > 0 and hyper.option("trust_ratio"):
        direction.mul_(norms.param / norms.measured)
    return direction, m


#: You et al. 2019.
LAMB = Rule("lamb", _lamb, _layerwise, measured=lambda x, hyper: _decayed_adamw(x, hyper)[0])


def _growing(group: Mapping[str, Any], step: int) -> Hyper:
    """Adafactor's options; the second moment's decay ``1 - step^beta2_decay`` is 0 at first and grows towards 1."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return Hyper(
        step,
        lr=min(lr, step**-0.5) if group["relative_step"] else lr,
        beta1=float(group["beta1"] or 0.0),
        beta2=1 - step ** float(group["beta2_decay"]),
        weight_decay=decay,
        maximize=group["maximize"],
        shrink=lr * decay,
        options=group,
    )


def _normalized(x: Elements, hyper: Hyper) -> Tensor:
    """``g / max(sqrt(v), eps)``; eps is the arithmetic's own unless the group says otherwise."""
    eps = hyper.option("eps")[0]
    smallest = torch.finfo(x.g.dtype).eps if eps is None else float(eps)
    return x.g / cast(Tensor, x.v).sqrt().clamp_(min=smallest)


def _adafactor(x: Elements, hyper: Hyper, norms: Norms | None) -> tuple[Tensor, Tensor | None]:
    """The normalised gradient, its RMS clipped to ``d``, averaged where there is a first moment, times RMS(p)."""
    norms = cast(Norms, norms)
    root = norms.numel**0.5
    clipped = _normalized(x, hyper).div_(max(1.0, norms.measured / (root * float(hyper.option("d")))))
    scale = max(float(hyper.option("eps")[1]), norms.param / root) if hyper.option("scale_parameter") else 1.0
    if x.m is None:
        return clipped.mul_(scale), None
    m = torch.lerp(x.m, clipped, 1 - hyper.beta1)
    return m * scale, m


#: Shazeer & Stern 2018.
ADAFACTOR = Rule("adafactor", _adafactor, _growing, measured=_normalized)
