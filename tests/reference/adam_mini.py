"""Adam-mini as its paper puts it, one parameter at a time, in fp64 numpy: blocks are given as lists of flat indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gefen import Array


def row_groups(shape: tuple[int, int], groups: Sequence[Sequence[int]], axis: int = 0) -> list[NDArray[np.int64]]:
    """Flat indices of the elements in each group of rows (``axis`` 0) or columns (1)."""
    index = np.arange(shape[0] * shape[1]).reshape(shape)
    return [np.take(index, list(group), axis=axis).reshape(-1) for group in groups]


@dataclass
class AdamMini:
    """``groups``: flat indices of the elements that share a second moment."""

    groups: Sequence[NDArray[np.int64]]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    t: int = 0
    m: Any = 0.0

    def __post_init__(self) -> None:
        self.v = np.zeros(len(self.groups))

    def step(self, p: Array, g: Array) -> Array:
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        direction = np.empty(g.size)
        for index, group in enumerate(self.groups):
            self.v[index] = b2 * self.v[index] + (1 - b2) * np.mean(g.reshape(-1)[group] ** 2)
            root = np.sqrt(self.v[index] / (1 - b2**self.t)) + self.eps
            direction[group] = self.m.reshape(-1)[group] / (1 - b1**self.t) / root
        return np.asarray((1 - self.lr * self.weight_decay) * p - self.lr * direction.reshape(p.shape))
