"""Lion (Chen et al. 2023, arXiv 2302.06675)."""

from __future__ import annotations

import torch
from torch import Tensor

from daypack.rules.base import Elements, Rule, bias_corrected, decoupled, mean_of_gradients


def _direction(x: Elements) -> Tensor:
    """Return ``sign(b1 m + (1 - b1) g)``; then ``m = b2 m + (1 - b2) g``."""
    return torch.lerp(x.old("exp_avg"), x.g, 1 - x.hyper.beta1).sign_()


LION = Rule(
    "lion",
    (mean_of_gradients(beta=lambda hyper: hyper.beta2, scale=bias_corrected(1)),),
    _direction,
    decoupled,
    ("lr", "betas", "weight_decay", "maximize"),
)
