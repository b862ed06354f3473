"""AdEMAMix as its paper puts it, one parameter at a time, in fp64 numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .gefen import Array
from .second_moment import SecondMoment


def alpha_at(t: int, alpha: float, warmup: int | None) -> float:
    """From 0 to ``alpha`` in a straight line over ``warmup`` steps; None: at once."""
    return alpha if warmup is None else alpha * min(t / warmup, 1.0)


def beta3_at(t: int, start: float, end: float, warmup: int | None) -> float:
    """From ``start`` to ``end`` over ``warmup`` steps, so that the half-life grows in a straight line.

    The authors' code for torch adds 1e-8 to a beta before it takes the logarithm; the paper does not.
    """
    if warmup is None or t >= warmup:
        return end
    share = t / warmup
    # The half-life of an average is ln 0.5 / ln beta steps. That of 0 is 0.
    life = (1 - share) * (1 / math.log(start) if start else 0.0) + share / math.log(end)
    return math.exp(1 / life)


@dataclass
class AdEMAMix:
    """Pagliardini et al. 2024 (arXiv 2409.03137), algorithm 1; ``factored`` for matrices.

    The slow average ``m2`` starts at 0 and is not corrected for it.
    """

    lr: float = 1e-3
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999)
    alpha: float = 5.0
    alpha_warmup: int | None = None
    beta3_warmup: int | None = None
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False
    factored: bool = False
    t: int = 0
    m1: Any = 0.0
    m2: Any = 0.0

    def __post_init__(self) -> None:
        self.v = SecondMoment(self.factored)

    def step(self, p: Array, g: Array) -> Array:
        self.t += 1
        b1, b2, last = self.betas
        b3 = beta3_at(self.t, b1, last, self.beta3_warmup)
        alpha = alpha_at(self.t, self.alpha, self.alpha_warmup)
        g = -g if self.maximize else g
        self.m1 = b1 * self.m1 + (1 - b1) * g
        self.m2 = b3 * self.m2 + (1 - b3) * g
        self.v.average(g * g, b2)
        root = np.sqrt(self.v.value() / (1 - b2**self.t)) + self.eps
        direction = (self.m1 / (1 - b1**self.t) + alpha * self.m2) / root
        return np.asarray(p - self.lr * (direction + self.weight_decay * p))
