"""ADOPT (Taniguchi et al. 2024, arXiv 2411.02853), with clipping and decoupled decay."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from daypack.rules.base import (
    ADAMW_OPTIONS,
    Elements,
    Hyper,
    Meaning,
    Moment,
    Options,
    Rule,
    decoupled,
    mean_of_squares,
    unbiased,
)


def _options(group: Options, step: int) -> Hyper:
    """Return AdamW's options. The first step only sets the second moment to ``g^2``: no parameter moves or decays."""
    hyper = decoupled(group, step)
    return hyper if step > 1 else replace(hyper, beta2=0.0, shrink=0.0)


def _normalized(x: Elements) -> Tensor:
    """Return ``g / max(sqrt(v), eps)`` of the OLD ``v``, clipped to the fourth root of the number of earlier steps."""
    bound = (x.hyper.step - 1) ** 0.25
    return (x.g / x.old("exp_avg_sq").sqrt().clamp_(min=x.hyper.eps)).clamp_(-bound, bound)


def _advance(x: Elements) -> Tensor:
    """Return ``m = b1 m + (1 - b1) u``, where ``u`` is the normalised gradient."""
    return torch.lerp(x.old("exp_avg"), _normalized(x), 1 - x.hyper.beta1)


ADOPT = Rule(
    "adopt",
    (
        Moment("exp_avg", _advance, Meaning("ADOPT's normalised gradient"), alone=False),
        mean_of_squares(scale=unbiased, late=True),
    ),
    lambda x: x.new("exp_avg"),
    _options,
    ADAMW_OPTIONS,
)
