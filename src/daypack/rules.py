"""Update rules: pure functions on fp32 (fp64) tensors that read like their papers. They know nothing of storage.

A rule's ``hyper`` reads the options of a group, its ``direction`` turns old first moment, new second moment and
gradient into what is subtracted, times the learning rate. See `daypack.update.Rule` and `daypack.update.Elements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from daypack.update import Elements, Hyper, Rule


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


def _momentum(group: Mapping[str, Any], step: int) -> Hyper:
    """SGD's options: ``beta1`` is the momentum; decay is part of the gradient."""
    decay, momentum = float(group["weight_decay"]), float(group["momentum"])
    return Hyper(
        step, float(group["lr"]), momentum, weight_decay=decay, maximize=group["maximize"], coupled=decay, options=group
    )


def _lion_options(group: Mapping[str, Any], step: int) -> Hyper:
    """Lion's options; decay shrinks the parameter by ``lr * weight_decay``."""
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return Hyper(step, lr, beta1, beta2, weight_decay=decay, maximize=group["maximize"], shrink=lr * decay)


def _adamw(x: Elements, hyper: Hyper, _: float = 1.0) -> tuple[Tensor, Tensor]:
    """``(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``."""
    m = torch.lerp(cast(Tensor, x.m), x.g, 1 - hyper.beta1)
    denominator = (cast(Tensor, x.v) / hyper.bias_correction2).sqrt_().add_(hyper.eps)
    return (m / hyper.bias_correction1).div_(denominator), m


def _sgd(x: Elements, hyper: Hyper, _: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """``m = momentum m + (1 - dampening) g``, ``m = g`` at the first step; direction ``m``, or ``g + momentum m``."""
    if x.m is None:
        return x.g, None
    m = x.g if hyper.step == 1 else (x.m * hyper.beta1).add_(x.g, alpha=1 - float(hyper.option("dampening")))
    return x.g.add(m, alpha=hyper.beta1) if hyper.option("nesterov") else m, m


def _lion(x: Elements, hyper: Hyper, _: float = 1.0) -> tuple[Tensor, Tensor]:
    """``sign(b1 m + (1 - b1) g)``; then ``m = b2 m + (1 - b2) g``."""
    m = cast(Tensor, x.m)
    return torch.lerp(m, x.g, 1 - hyper.beta1).sign_(), torch.lerp(m, x.g, 1 - hyper.beta2)


#: Loshchilov & Hutter 2017.
ADAMW = Rule("adamw", _adamw, _decoupled)
#: Kingma & Ba 2014, weight decay as an L2 penalty.
ADAM = Rule("adam", _adamw, _coupled)
#: Polyak's and Nesterov's momentum as `torch.optim.SGD` has them.
SGD = Rule("sgd", _sgd, _momentum)
#: Chen et al. 2023, arXiv 2302.06675.
LION = Rule("lion", _lion, _lion_options)
