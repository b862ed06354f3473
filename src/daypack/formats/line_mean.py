"""A second moment stored as one mean of g^2 for each group of rows or of columns (Adam-mini, arXiv 2406.16793)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import ClassVar, Literal

import torch
from torch import Tensor

from daypack.formats.base import ComponentSpec, State, StateFormat, not_squares
from daypack.geometry import Chunk, Geometry, accumulator

#: Runs of lines: (lines, lines per group); the last group of a run may be smaller.
Segments = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LineMean(StateFormat):
    """4 bytes per row (or per column), each holding the mean of g^2 over the whole group that its row belongs to.

    So the state's shape does not depend on the partition, and a shard of dim 0 is a shard of it.

    Attributes:
        axis: ``"row"``, or ``"col"`` for weights whose outputs are columns.
        segments: the groups, in order; their lines add up to the rows (columns) of one matrix of the parameter.
    """

    axis: Literal["row", "col"]
    segments: Segments

    statistics: ClassVar[bool] = True

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        shape = view.row_shape if self.axis == "row" else view.col_shape
        follows = self.axis == "row" or view.batched
        return (ComponentSpec("_" + self.axis, shape, accumulator(dtype), follows),)

    def sums(self, state: State, name: str, view: Geometry, like: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros(view.matrices, group_count(self.segments), dtype=like.dtype, device=like.device),)

    def observe(self, sums: tuple[Tensor, ...], view: Geometry, chunk: Chunk, squared: Tensor) -> None:
        matrix, row, col = chunk
        owners, _ = self.lines(view, squared.device)
        lines = (row, -1) if self.axis == "row" else (col, -2)
        sums[0][matrix].index_add_(1, owners[lines[0]], squared.sum(lines[1]))

    def shared(self, view: Geometry) -> int:
        # Rows that are groups by themselves are whole on one rank.
        apart = self.axis == "row" and all(size == 1 for _, size in self.segments)
        return 0 if view.batched or apart else group_count(self.segments)

    def shared_sums(self, sums: tuple[Tensor, ...]) -> Tensor:
        return sums[0]

    def combine(self, state: State, name: str, view: Geometry, sums: tuple[Tensor, ...], beta: float) -> None:
        mean = state[f"{name}_{self.axis}"]
        owners, sizes = self.lines(view, mean.device)
        group = sums[0] / (sizes * (view.cols if self.axis == "row" else view.whole_rows))
        mean.lerp_(group[:, owners].view(mean.shape), 1 - beta)

    def lines(self, view: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the group of each local line, and the number of lines in each group over all ranks."""
        owners, sizes = _layout(self.segments, device)
        if self.axis == "col" or view.batched:
            return owners, sizes
        return owners[view.start : view.start + view.rows], sizes

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        matrix, row, col = chunk
        mean: Tensor = state[f"{name}_{self.axis}"]
        if self.axis == "row":
            return mean.view(view.matrices, view.rows, 1)[matrix, row]
        return mean.view(view.matrices, 1, view.cols)[matrix, :, col]

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        return not_squares(f"{name}_{self.axis}", state[f"{name}_{self.axis}"])

    def label(self, state: State, name: str) -> str:
        return f"mean/{'column' if self.axis == 'col' else 'row'}"


def group_count(segments: Segments) -> int:
    """Return the number of groups in one matrix."""
    return sum(ceil(lines / size) for lines, size in segments)


@lru_cache(maxsize=1024)
def _layout(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the group of each line and the number of lines in each group, both int64."""
    sizes: list[int] = []
    for lines, size in segments:
        sizes += [size] * (lines // size) + [lines % size] * (lines % size > 0)
    counts = torch.tensor(sizes, dtype=torch.int64, device=device)
    return torch.arange(len(sizes), device=device).repeat_interleave(counts), counts
