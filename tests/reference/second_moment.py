"""Averages of g^2 for the other twins: one for each element, or as factors of rows and columns (see gefen.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .gefen import Array


@dataclass
class SecondMoment:
    """``v <- decay v + (1 - decay) g^2``; with ``factored``, for matrices, the same of its row and column means."""

    factored: bool = False
    v: Any = 0.0
    row: Any = 0.0
    col: Any = 0.0

    def average(self, square: Array, decay: float) -> None:
        if self.factored:
            self.row = decay * self.row + (1 - decay) * square.mean(1)
            self.col = decay * self.col + (1 - decay) * square.mean(0)
        else:
            self.v = decay * self.v + (1 - decay) * square

    def value(self) -> Array:
        """``v[i, j] = row[i] col[j] / mean(col)`` of factors."""
        if not self.factored:
            return np.asarray(self.v)
        mean = self.col.mean()
        return np.outer(self.row, self.col / mean if mean else np.zeros_like(self.col))
