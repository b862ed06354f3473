"""One pass over a moment as numbers: norm, extremes, rows of zeros, and what a page draws of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daypack.checkpoint.moments import Numbers
from daypack.geometry import Chunk, Geometry

#: Edges of histograms: powers of ten, four parts each. What lies outside is counted in the first or last part.
LOWEST, HIGHEST, PARTS = -28, 8, 4
EDGES = tuple(LOWEST + i / PARTS for i in range((HIGHEST - LOWEST) * PARTS + 1))
#: Cells of a map, at most.
MAP_ROWS, MAP_COLS = 96, 160


@dataclass(frozen=True)
class Summary:
    """What a pass found. ``histogram`` and ``grid``: see `daypack.inspection.result.Picture`; None if not wanted."""

    norm: float
    largest: float
    nonfinite: int
    zero_rows: int
    histogram: Tensor | None
    grid: Tensor | None


def summarise(source: Numbers, root: bool, pictured: bool) -> Summary:
    """Measure a moment, a chunk at a time; ``root``: measure its square root, negative values counted as 0."""
    view, total, largest, nonfinite = source.view, 0.0, 0.0, 0
    used = torch.zeros(view.matrices, view.rows, dtype=torch.bool)
    histogram = torch.zeros(len(EDGES) - 1, dtype=torch.int64) if pictured else None
    rows, cells = view.matrices * view.rows, view.matrices * view.rows * view.cols
    pool = Pool(rows, view.cols) if pictured and cells and rows > 1 else None
    for chunk in source.chunks():
        x = source.read(chunk).double()
        finite = x.isfinite()
        nonfinite += x.numel() - int(finite.sum())
        used[chunk[0], chunk[1]] |= (x != 0).any(-1)
        x = torch.where(finite, x, 0)
        x = x.clamp_min(0).sqrt() if root else x.abs()
        total += float(x.square().sum())
        largest = max(largest, float(x.amax()))
        if histogram is not None:
            histogram += _counts(x)
        if pool is not None:
            pool.add(view, chunk, x)
    zero_rows = int((~used).sum()) if cells else 0
    return Summary(total**0.5, largest, nonfinite, zero_rows, histogram, pool.mean() if pool is not None else None)


def _counts(x: Tensor) -> Tensor:
    """Count ``log10 x`` of all ``x > 0`` between the edges."""
    places = ((x[x > 0].log10() - LOWEST) * PARTS).floor().long().clamp_(0, len(EDGES) - 2)
    return places.bincount(minlength=len(EDGES) - 1)


class Pool:
    """Means over the cells of a coarse grid laid over ``rows x cols`` numbers."""

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols = rows, cols
        self.shape = min(rows, MAP_ROWS), min(cols, MAP_COLS)
        self.sum = torch.zeros(self.shape, dtype=torch.float64)

    def add(self, view: Geometry, chunk: Chunk, x: Tensor) -> None:
        """Add ``x`` ``[b, r, c]``, the numbers under ``chunk`` of ``[matrices, rows, cols]``."""
        matrix, row, col = (torch.arange(*part.indices(size)) for part, size in zip(chunk, view.view3, strict=True))
        rows = (matrix[:, None] * view.rows + row).reshape(-1) * self.shape[0] // self.rows
        cells = x.new_zeros(len(rows), self.shape[1])
        cells.index_add_(1, col * self.shape[1] // self.cols, x.reshape(len(rows), -1))
        self.sum.index_add_(0, rows, cells)

    def mean(self) -> Tensor:
        counts = [
            (torch.arange(size) * cells // size).bincount(minlength=cells).double()
            for size, cells in ((self.rows, self.shape[0]), (self.cols, self.shape[1]))
        ]
        return self.sum / (counts[0][:, None] * counts[1]).clamp_min(1)
