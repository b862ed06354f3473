"""Adafactor (Shazeer & Stern 2018, arXiv 1804.04235)."""

from __future__ import annotations

import torch
from torch import Tensor

from daypack.rules.base import Elements, Hyper, Meaning, Moment, Options, Rule, mean_of_squares, unbiased


def _options(group: Options, step: int) -> Hyper:
    """Return Adafactor's options; the second moment's decay, ``1 - step^beta2_decay``, is 0 at first and grows towards
    1.
    """
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


def _normalized(x: Elements) -> Tensor:
    """Return ``g / max(sqrt(v), eps)``; eps is the machine epsilon unless the group gives another."""
    eps = x.hyper.option("eps")[0]
    smallest = torch.finfo(x.g.dtype).eps if eps is None else float(eps)
    return x.g / x.new("exp_avg_sq").sqrt().clamp_(min=smallest)


def _clipped(x: Elements) -> Tensor:
    """Return the normalised gradient, its RMS over the whole parameter clipped to ``d``."""
    root = x.norms.numel**0.5
    return _normalized(x).div_(max(1.0, x.norms.measured / (root * float(x.hyper.option("d")))))


def _advance(x: Elements) -> Tensor:
    """Return ``m = b1 m + (1 - b1) u``, where ``u`` is the clipped direction."""
    return torch.lerp(x.old("exp_avg"), _clipped(x), 1 - x.hyper.beta1)


def _direction(x: Elements) -> Tensor:
    """Return the clipped direction, averaged where there is a first moment, times RMS(p)."""
    option, root = x.hyper.option, x.norms.numel**0.5
    scale = max(float(option("eps")[1]), x.norms.param / root) if option("scale_parameter") else 1.0
    return x.new("exp_avg") * scale if x.keeps("exp_avg") else _clipped(x).mul_(scale)


ADAFACTOR = Rule(
    "adafactor",
    (
        Moment("exp_avg", _advance, Meaning("Adafactor's direction"), alone=False),
        mean_of_squares(scale=unbiased),
    ),
    _direction,
    _options,
    (
        *("lr", "beta1", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
        *("relative_step", "scale_parameter"),
    ),
    measured=_normalized,
)
