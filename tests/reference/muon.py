"""Muon as Jordan et al. put it and torch.optim spells it, one matrix at a time, in fp64 numpy throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .gefen import Array


def orthogonalized(
    u: Array, coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), steps: int = 5, eps: float = 1e-7
) -> Array:
    """Newton-Schulz: the singular values of ``u`` go towards 1, its singular vectors stay.

    Each step is ``x <- a x + (b s + c s^2) x`` with ``s = x x^T``, on the side where that is the smaller matrix. It
    starts from ``u`` over its Frobenius norm, so that no singular value is above 1.
    """
    a, b, c = coefficients
    tall = u.shape[0] > u.shape[1]
    x = (u.T if tall else u) / max(float(np.linalg.norm(u)), eps)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


def factor_of(shape: tuple[int, ...], adjust: str | None) -> float:
    """What the learning rate is multiplied by: Jordan's factor (None: the same), or Liu et al.'s (arXiv 2502.16982)."""
    rows, cols = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


@dataclass
class Muon:
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with torch's averages and decoupled decay."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    maximize: bool = False
    m: Any = 0.0

    def step(self, p: Array, g: Array) -> Array:
        mu = self.momentum
        g = -g if self.maximize else g
        self.m = mu * self.m + (1 - mu) * g
        u = mu * self.m + (1 - mu) * g if self.nesterov else self.m
        direction = orthogonalized(u, self.ns_coefficients, self.ns_steps, self.eps)
        rate = self.lr * factor_of(p.shape, self.adjust_lr_fn)
        return np.asarray((1 - self.lr * self.weight_decay) * p - rate * direction)
