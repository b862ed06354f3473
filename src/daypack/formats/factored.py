"""A second moment stored as the row means and column means of g^2, its rank-1 estimate (Shazeer & Stern 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from daypack.formats.base import ComponentSpec, State, StateFormat, not_squares
from daypack.geometry import Chunk, Geometry, accumulator


@dataclass(frozen=True)
class Factored(StateFormat):
    """``rows + cols`` numbers per matrix: ``v[i, j] = r[i] * (c[j] / mean(c))``.

    The recurrences of ``r`` and ``c`` are exact; only the product is an estimate. It is exact where g^2 has rank 1,
    which includes every matrix with one row or one column.
    """

    statistics: ClassVar[bool] = True

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        real = accumulator(dtype)
        return (
            ComponentSpec("_row", view.row_shape, real),
            ComponentSpec("_col", view.col_shape, real, follows=view.batched),
        )

    def sums(self, state: State, name: str, view: Geometry, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros(view.matrices, n, dtype=like.dtype, device=like.device) for n in (view.rows, view.cols)
        )

    def observe(self, sums: tuple[Tensor, ...], view: Geometry, chunk: Chunk, squared: Tensor) -> None:
        matrix, row, col = chunk
        sums[0][matrix, row] += squared.sum(-1)
        sums[1][matrix, col] += squared.sum(-2)

    def shared(self, view: Geometry) -> int:
        return 0 if view.batched else view.cols

    def shared_sums(self, sums: tuple[Tensor, ...]) -> Tensor:
        return sums[1]

    def combine(self, state: State, name: str, view: Geometry, sums: tuple[Tensor, ...], beta: float) -> None:
        for key, total, count in (("_row", sums[0], view.cols), ("_col", sums[1], view.whole_rows)):
            mean = state[name + key]
            mean.lerp_((total / count).view(mean.shape), 1 - beta)

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        return self.decoder(state, name, view)(chunk)

    def decoder(self, state: State, name: str, view: Geometry) -> Callable[[Chunk], Tensor]:
        r = state[name + "_row"].view(view.matrices, view.rows, 1)
        c = state[name + "_col"].view(view.matrices, 1, view.cols)
        mean = c.mean(-1, keepdim=True)

        def read(chunk: Chunk) -> Tensor:
            matrix, row, col = chunk
            # Dividing before multiplying keeps r * c from overflowing at |g| = 1e10 and from vanishing at 1e-12.
            share = (c[matrix, :, col] / mean[matrix]).nan_to_num_(nan=0.0)
            v: Tensor = r[matrix, row] * share
            return v

        return read

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        return next(filter(None, (not_squares(name + key, state[name + key]) for key in ("_row", "_col"))), None)
