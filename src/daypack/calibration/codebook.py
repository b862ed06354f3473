"""The 8-bit codebook: 256 levels that minimise the squared error on a histogram exactly (Gefen, arXiv 2606.13894)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.geometry import Geometry, accumulator, blocked, chunks, read

BINS = 4096
LEVELS = 256
#: Levels are multiples of 1 / GRID: 16-bit numbers, exact in kernels that look levels up in vector registers. Rounding
#: to the grid adds 3e-10 to a mean squared error of 2e-6 or so.
GRID = 1 << 14
#: Neighbouring levels are at least this far apart: half a bin of the histogram that they come from.
MIN_GAP = 2.0**-12
#: Counts of a Gaussian added to every histogram, because a small first gradient alone gives a poor codebook.
PRIOR_COUNTS = 65536

Array = NDArray[np.float64]


def histogram(grad: Tensor, view: Geometry, block_size: int) -> Tensor:
    """Count ``grad / absmax of its block`` in bins over [-1, 1], exact zeros left out. Returns int64 ``[BINS]``."""
    block = min(block_size, view.cols)
    counts = torch.zeros(BINS, dtype=torch.int64, device=grad.device)
    for chunk in chunks(view, align=block):
        parts = blocked(read(grad, view, chunk).to(accumulator(grad.dtype)), block)
        scale = parts.abs().amax(-1, keepdim=True)
        unit = (parts / scale)[parts != 0]
        bins = unit.add_(1).mul_(BINS // 2).to(torch.int32).clamp_(max=BINS - 1)
        counts += torch.bincount(bins, minlength=BINS)
    return counts


@lru_cache(maxsize=16)
def gaussian_prior(block_size: int) -> Array:
    """Return the distribution over the bins of a Gaussian element divided by its block's absmax; sums to 1 -
    1/block_size.

    Given the block's absmax M the other elements are Gaussians cut off at M; M's own density is that of the largest of
    ``block_size`` magnitudes. The element that is the absmax falls on a pinned level and needs no count.
    """
    edges = torch.linspace(0, 1, BINS // 2 + 1, dtype=torch.float64)
    top = torch.linspace(0, 8, 1025, dtype=torch.float64)[1:]
    inside = torch.erf(top / 2**0.5)  # P(|z| < top)
    weight = inside**block_size - torch.cat([torch.zeros(1, dtype=torch.float64), inside[:-1] ** block_size])
    likely = weight > 1e-18  # all others together are too small to matter
    top, weight = top[likely], (weight / inside)[likely]
    below = torch.zeros(BINS // 2 + 1, dtype=torch.float64)  # P(|element| < edge)
    for piece in (slice(i, i + 64) for i in range(0, len(top), 64)):  # 1 MiB at a time
        below += weight[piece] @ torch.erf(edges[None] * top[piece, None] / 2**0.5)
    half = below.diff() * ((1 - 1 / block_size) / 2)
    return np.asarray(torch.cat([half.flip(0), half]), np.float64)


def learn(counts: Tensor, block_size: int, solve: Callable[[Array, int], Array] | None = None) -> Tensor:
    """Return the codebook for a histogram of normalised first gradients: fp32 ``[LEVELS]`` on the CPU, from -1 up to 1.

    Args:
        solve: `optimal_levels`, or a faster function that returns the same.
    """
    weights = counts.cpu().numpy().astype(np.float64) + PRIOR_COUNTS * gaussian_prior(block_size)
    return on_grid((solve or optimal_levels)(weights, LEVELS))


def on_grid(levels: Array) -> Tensor:
    """Round ``levels`` to multiples of 1 / `GRID`, fp32. `MIN_GAP` is a whole number of these, so levels keep that
    distance.
    """
    return torch.from_numpy(np.round(levels * GRID) / GRID).to(torch.float32)


def optimal_levels(weights: Array, levels: int) -> Array:
    """Return the ``levels`` values in [-1, 1] with the least weighted squared error, -1, 0 and 1 among them; fp64,
    rising.

    Args:
        weights: non-negative, one per bin of equal width over [-1, 1]; an even number of bins. A bin counts as if all
            of its weight stood at its centre.
        levels: at least 3.

    Pinning 0 splits the problem. Each half is a 1-D k-means between two fixed levels; its cost satisfies the Monge
    condition, so the best last boundary rises with the position, and one layer of the dynamic programme (one more
    level) takes O(N log N) by divide and conquer. Both halves run through the same vectorised passes. Then the free
    levels are divided between the halves so that the sum of the two errors is least. Exact: the same optimum as the
    O(levels * N^2) programme.
    """
    free = levels - 3
    half = len(weights) // 2
    halves = _Halves(np.stack([weights[:half][::-1], weights[half:]]))
    errors, boundaries, last = halves.solve(free)
    left = int(np.argmin(errors[0] + errors[1, ::-1]))
    below, above = (halves.levels(side, count, boundaries, last) for side, count in ((0, left), (1, free - left)))
    return with_pinned(np.concatenate([-below, above]), levels)


def with_pinned(values: Array, levels: int) -> Array:
    """Join the free levels ``values`` with -1, 0 and 1, in rising order, and fill up to ``levels`` where some are left
    over.
    """
    return _fill(np.unique(np.concatenate([np.array([-1.0, 0.0, 1.0]), values])), levels)


class _Halves:
    """Both halves of a histogram, seen from 0 outwards: bins of width 1/N, centres in (0, 1), weights ``[2, N]``."""

    def __init__(self, weights: Array) -> None:
        self.bins = weights.shape[1]
        centre = (np.arange(self.bins) + 0.5) / self.bins
        moments = np.stack([weights, weights * centre, weights * centre**2])
        # Prefix sums: the moments of bins [i, j) are prefix[..., j] - prefix[..., i]. One row a half, laid end to end.
        self.prefix = np.concatenate([np.zeros((3, 2, 1)), moments.cumsum(-1)], axis=-1).reshape(3, -1)
        self.size = self.bins + 1

    def _cost(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> Array:
        """Return the squared error of bins [start, stop) around their own mean. Positions are flat indices into
        `prefix`.
        """
        w, x, xx = self.prefix[:, stop] - self.prefix[:, start]
        cost: Array = np.maximum(xx - x * x / np.maximum(w, 1e-300), 0.0)
        return cost

    def solve(self, free: int) -> tuple[Array, NDArray[np.int16], NDArray[np.int64]]:
        """Find the least error for every number of levels, 0 to ``free``, between the two fixed ones.

        Returns:
            errors ``[2, free + 1]``; for layer k and position j the start of the last free segment,
            ``[free, 2, N + 1]``; and the position where the outer fixed level takes over, ``[free + 1, 2]``.
        """
        n = self.size
        w, x, xx = self.prefix.reshape(3, 2, n)
        outer = (xx[:, -1:] - xx) - 2 * (x[:, -1:] - x) + (w[:, -1:] - w)
        best = xx.copy()  # the first j bins all go to level 0
        errors = np.empty((2, free + 1))
        boundaries = np.zeros((free, 2, n), np.int16)
        last = np.empty((free + 1, 2), np.int64)
        passes = _passes(self.bins)
        for k in range(free + 1):
            total = best + outer
            last[k] = total.argmin(1)
            errors[:, k] = total[[0, 1], last[k]]
            if k < free:
                best, boundaries[k] = self._layer(best, passes)
        return errors, boundaries, last

    def _layer(self, best: Array, passes: list[NDArray[np.int64]]) -> tuple[Array, NDArray[np.int64]]:
        """Return ``new[j] = min over i <= j of best[i] + cost(i, j)`` and the minimising i, both ``[2, N + 1]``."""
        n = self.size
        flat = best.reshape(-1)
        new = np.zeros(2 * n)
        arg = np.zeros(2 * n, np.int64)
        for js in passes:
            step = js[0]
            stop = np.concatenate([js, js + n])
            after = np.minimum(js + step, n - 1)
            low = arg[np.concatenate([js - step, js - step + n])]
            high = np.minimum(arg[np.concatenate([after, after + n])], np.concatenate([js, js]))
            if step == js[-1] == self.bins:
                high = np.concatenate([js, js])  # the first pass has no right neighbour yet
            length = high - low + 1
            begin = np.concatenate([[0], length.cumsum()[:-1]])
            side = np.repeat([0, n], len(js))
            start = np.arange(length.sum()) + np.repeat(low + side - begin, length)
            value = flat[start] + self._cost(start, np.repeat(stop, length))
            least = np.minimum.reduceat(value, begin)
            hit = np.flatnonzero(value == np.repeat(least, length))
            new[stop] = least
            arg[stop] = start[hit[np.searchsorted(hit, begin)]] - side
        return new.reshape(2, n), arg.reshape(2, n)

    def levels(self, side: int, count: int, boundaries: NDArray[np.int16], last: NDArray[np.int64]) -> Array:
        """Return the ``count`` free levels of one half, from 0 outwards: the means of their segments. Empty segments
        give none.
        """
        stop, values = int(last[count, side]), []
        for k in range(count - 1, -1, -1):
            start = int(boundaries[k, side, stop])
            w, x, _ = self.prefix[:, side * self.size + stop] - self.prefix[:, side * self.size + start]
            if w > 0:
                values.append(x / w)
            stop = start
        return np.array(values[::-1])


def _passes(bins: int) -> list[NDArray[np.int64]]:
    """Return positions 1..bins in passes; both neighbours at a pass's distance come in earlier passes."""
    passes = [np.array([bins])]
    step = 1 << (bins - 1).bit_length() - 1
    while step:
        passes.append(np.arange(step, bins, 2 * step))
        step //= 2
    return passes


def _fill(values: Array, levels: int) -> Array:
    """Add midpoints of the widest gaps until there are ``levels``: a histogram with few used bins leaves some over."""
    while len(values) < levels:
        widest = int(np.diff(values).argmax())
        values = np.insert(values, widest + 1, values[widest : widest + 2].mean())
    return values
