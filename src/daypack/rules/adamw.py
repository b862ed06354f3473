"""AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101) and Adam (Kingma & Ba 2014, arXiv 1412.6980)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from daypack.rules.base import (
    ADAMW_OPTIONS,
    Elements,
    Hyper,
    Options,
    Rule,
    decoupled,
    mean_of_gradients,
    mean_of_squares,
)


def adamw(x: Elements) -> Tensor:
    """Return ``(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``."""
    denominator = (x.new("exp_avg_sq") / x.hyper.bias_correction2).sqrt_().add_(x.hyper.eps)
    return (x.new("exp_avg") / x.hyper.bias_correction1).div_(denominator)


def _coupled(group: Options, step: int) -> Hyper:
    """Return Adam's options; decay is part of the gradient."""
    hyper = decoupled(group, step)
    return replace(hyper, shrink=0.0, coupled=hyper.weight_decay)


MOMENTS = (mean_of_gradients(), mean_of_squares())
ADAMW = Rule("adamw", MOMENTS, adamw, decoupled, ADAMW_OPTIONS)
#: Weight decay as an L2 penalty.
ADAM = Rule("adam", MOMENTS, adamw, _coupled, ADAMW_OPTIONS)
