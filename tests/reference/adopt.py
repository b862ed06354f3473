"""ADOPT as its paper puts it, one parameter at a time, in fp64 numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .gefen import Array
from .second_moment import SecondMoment


@dataclass
class Adopt:
    """Taniguchi et al. 2024 (arXiv 2411.02853), with clipping and decoupled decay; ``factored`` for matrices.

    A gradient is divided by the root of a second moment that has not seen it, before it enters the first moment. The
    first step has no such second moment: it sets ``v`` and moves nothing.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.9999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False
    decoupled: bool = True
    factored: bool = False
    t: int = 0
    m: Any = 0.0

    def __post_init__(self) -> None:
        self.v = SecondMoment(self.factored)

    def step(self, p: Array, g: Array) -> Array:
        self.t += 1
        b1, b2 = self.betas
        g = -g if self.maximize else g
        if not self.decoupled:
            g = g + self.weight_decay * p
        if self.t == 1:
            self.m = np.zeros_like(p)
            self.v.average(g * g, 0.0)
            return p
        bound = (self.t - 1) ** 0.25
        normed = np.clip(g / np.maximum(np.sqrt(self.v.value()), self.eps), -bound, bound)
        self.m = b1 * self.m + (1 - b1) * normed
        self.v.average(g * g, b2)
        decay = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        return np.asarray(decay * p - self.lr * self.m)
