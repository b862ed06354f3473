"""Gefen and AdamW as the papers put them, one parameter at a time, in fp64 numpy.

Nothing here is shared with the library. The first moment's codes are not produced here: rounding for storage may be
random, so the twin says which codes are allowed (`Moment.allows`) and goes on from those that the library stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


# Geometry


def matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """``(count, rows, cols)`` of a parameter of two or more dims: the reading that stores fewer factors."""
    if len(shape) == 2:
        return (1, shape[0], shape[1])
    flat = (1, shape[0], math.prod(shape[1:]))
    batched = (math.prod(shape[:-2]), shape[-2], shape[-1])
    return min(flat, batched, key=lambda view: view[0] * (view[1] + view[2]))


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a tensor with one entry per row: leading dims of experts are kept."""
    batched = len(shape) > 2 and matrices(shape) != (1, shape[0], math.prod(shape[1:]))
    return tuple(shape[:-1]) if batched else (shape[0],)


def blocks(cols: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, cols)) for start in range(0, cols, size)]


# AdamW


@dataclass
class AdamW:
    """Loshchilov & Hutter 2017 (``decoupled``), Kingma & Ba 2014 with weight decay in the gradient (not)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False
    decoupled: bool = True
    t: int = 0
    m: Any = 0.0
    v: Any = 0.0

    def step(self, p: Array, g: Array) -> Array:
        self.t += 1
        b1, b2 = self.betas
        g = -g if self.maximize else g
        if not self.decoupled:
            g = g + self.weight_decay * p
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        direction = (self.m / (1 - b1**self.t)) / (np.sqrt(self.v / (1 - b2**self.t)) + self.eps)
        decay = 1 - self.lr * self.weight_decay if self.decoupled else 1.0
        return np.asarray(decay * p - self.lr * direction)


# Gefen


def bf16_up(x: Array) -> Array:
    """The smallest bf16 number that is not below ``x`` (x >= 0)."""
    single = np.asarray(x, dtype=np.float32)
    single = np.where(single.astype(np.float64) < x, np.nextafter(single, np.float32(np.inf)), single)
    raw = single.view(np.uint32)
    up = np.where(raw & 0xFFFF, (raw & np.uint32(0xFFFF0000)) + np.uint32(0x10000), raw).astype(np.uint32)
    return up.view(np.float32).astype(np.float64)


@dataclass
class Moment:
    """A first moment about to be stored: ``scaled`` in [-1, 1] (``[count, rows, cols]``) and its blocks' scales."""

    scaled: Array
    scale: Array

    def allows(self, codes: NDArray[np.uint8], levels: Array, nearest: bool = False) -> NDArray[np.bool_]:
        """Which codes are one of the two levels around the value (the nearest one, with ``nearest``).

        A value on a level admits only that level, up to fp32 rounding of the division.
        """
        x, slack = self.scaled, 1e-6
        below = np.concatenate([[-np.inf], levels])[codes]
        above = np.concatenate([levels, [np.inf]])[codes.astype(int) + 1]
        if nearest:
            level = levels[codes]
            return np.asarray((x >= (below + level) / 2 - slack) & (x <= (level + above) / 2 + slack))
        # A ulp or two off a level may carry a value over it; its other neighbour stays forbidden.
        return np.asarray((x > below - slack) & (x < above + slack))


@dataclass
class Gefen:
    """One compressed parameter. ``step`` returns the new parameter and what of m may be stored; then `adopt` codes.

    Args:
        v_block: columns per second-moment block, for ``second_moment="blocks"``.
        round_scale: how the absmax of a block is stored: `bf16_up`, or the identity beside fp64 parameters.
    """

    shape: tuple[int, ...]
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False
    second_moment: str = "factored"
    block_size: int = 256
    v_block: int = 0
    round_scale: Callable[[Array], Array] = bf16_up
    t: int = 0
    v: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count, rows, cols = self.view = matrices(self.shape)
        self.m = np.zeros(self.view)
        self.v = {
            "row": np.zeros((count, rows)),
            "col": np.zeros((count, cols)),
            "block": np.zeros((count, rows, -(-cols // max(self.v_block, 1)))),
        }

    def step(self, p: Array, g: Array) -> tuple[Array, Moment]:
        self.t += 1
        b1, b2 = self.betas
        g = (-g if self.maximize else g).reshape(self.view)
        fresh = b1 * self.m + (1 - b1) * g
        v = self._second_moment(g * g, b2)
        direction = (fresh / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + self.eps)
        new = (1 - self.lr * self.weight_decay) * p - self.lr * direction.reshape(self.shape)
        return new, self._store(fresh)

    def _second_moment(self, square: Array, b2: float) -> Array:
        if self.second_moment == "factored":
            r = self.v["row"] = b2 * self.v["row"] + (1 - b2) * square.mean(2)
            c = self.v["col"] = b2 * self.v["col"] + (1 - b2) * square.mean(1)
            mean = c.mean(1, keepdims=True)
            share = np.divide(c, mean, out=np.zeros_like(c), where=mean != 0)
            return np.asarray(r[:, :, None] * share[:, None, :])
        v = np.empty_like(square)
        for index, part in enumerate(blocks(square.shape[2], self.v_block)):
            mean = self.v["block"][:, :, index] = b2 * self.v["block"][:, :, index] + (1 - b2) * square[
                :, :, part
            ].mean(2)
            v[:, :, part] = mean[:, :, None]
        return v

    def _store(self, fresh: Array) -> Moment:
        parts = blocks(fresh.shape[2], self.block_size)
        scale = self.round_scale(np.stack([np.abs(fresh[:, :, part]).max(2) for part in parts], axis=2))
        wide = np.concatenate([np.repeat(scale[:, :, i, None], p.stop - p.start, 2) for i, p in enumerate(parts)], 2)
        return Moment(np.divide(fresh, wide, out=np.zeros_like(fresh), where=wide != 0), scale)

    def adopt(self, codes: NDArray[np.uint8], scale: Array, levels: Array) -> None:
        """Go on from the first moment that the library stored (``scale`` as ``[count, rows, blocks]``)."""
        decoded = levels[codes.reshape(self.view)]
        for index, part in enumerate(blocks(self.view[2], self.block_size)):
            self.m[:, :, part] = decoded[:, :, part] * scale[:, :, index, None]


# Block structure of the squared gradient


def block_candidates(cols: int) -> list[int]:
    """Block sizes to compare; a row must hold two for a difference between neighbours to exist."""
    return [size for size in range(16, min(cols // 2, 2048) + 1, 16) if cols % size == 0]


def block_score(g: Array, size: int) -> float:
    """Mean step between neighbouring blocks of a row, of the blocks' mean log g^2. ``g``: ``[rows, cols]``."""
    means = np.log(g**2 + 1e-12).reshape(len(g), -1, size).mean(2)
    return float(np.abs(np.diff(means, axis=1)).mean())


def find_block(g: Array) -> int:
    """The paper's search within rows; rows without structure share 256, or the largest divisor up to it."""
    cols = g.shape[1]
    sizes = block_candidates(cols)
    scores = [block_score(g, size) for size in sizes]
    peaks = [i for i in range(1, len(sizes) - 1) if scores[i] > scores[i - 1] and scores[i] > scores[i + 1]]
    if not peaks:
        divisors = [size for size in range(16, min(cols, 256) + 1) if cols % size == 0]
        return max(divisors, default=256)
    best = sizes[max(peaks, key=lambda i: scores[i])]
    if best > 1024:
        return min(size for size in sizes if size > 1024 and best % size == 0)
    return best


# The codebook


def codebook_error(weights: Array, levels: Array) -> float:
    """Weighted squared distance of the bins' centres over [-1, 1] to their nearest level."""
    centres = (np.arange(len(weights)) + 0.5) * 2 / len(weights) - 1
    ends = np.searchsorted(levels, centres).clip(1, len(levels) - 1)
    gap = np.minimum(np.abs(centres - levels[ends - 1]), np.abs(centres - levels[ends]))
    return float((weights * gap**2).sum())


def half_costs(weights: Array, most: int) -> Array:
    """Least error of bins over (0, 1) with 0 and 1 pinned and k free levels between, for k = 0..most; O(K N^2).

    The first run of bins goes to 0, the last to 1, and each run between to its own weighted mean.
    """
    n = len(weights)
    x = (np.arange(n) + 0.5) / n
    w, wx, wxx = (np.concatenate([[0.0], np.cumsum(weights * x**power)]) for power in range(3))
    to_zero = wxx  # of the first i bins
    to_one = (wxx[-1] - wxx) - 2 * (wx[-1] - wx) + (w[-1] - w)  # of the bins from i on
    mass, first, second = (s[None, :] - s[:, None] for s in (w, wx, wxx))
    with np.errstate(invalid="ignore", divide="ignore"):
        run = np.where(mass > 0, second - first**2 / mass, 0.0)  # of the bins from i up to j
    run = np.where(np.arange(n + 1)[:, None] <= np.arange(n + 1)[None, :], np.maximum(run, 0.0), np.inf)
    best, costs, sums = to_zero, [], np.empty_like(run)
    for _ in range(most + 1):
        costs.append((best + to_one).min())
        best = np.add(best[:, None], run, out=sums).min(0)
    return np.array(costs)


def optimal_error(weights: Array, levels: int) -> float:
    """Least error of ``levels`` levels in [-1, 1] with -1, 0 and 1 among them, over every division of the free ones."""
    free, middle = levels - 3, len(weights) // 2
    right = half_costs(weights[middle:], free)
    symmetric = np.array_equal(weights, weights[::-1])
    left = right if symmetric else half_costs(weights[:middle][::-1], free)
    return float((left + right[::-1]).min())


def brute_force_error(weights: Array, levels: int) -> float:
    """The same by trying every cut of each half into runs (some may be empty); for a handful of bins."""
    middle = len(weights) // 2
    halves = [weights[:middle][::-1], weights[middle:]]
    n = middle
    x = (np.arange(n) + 0.5) / n

    def cuts(start: int, runs: int) -> list[list[int]]:
        if runs == 0:
            return [[start]]
        return [[start, *rest] for end in range(start, n + 1) for rest in cuts(end, runs - 1)]

    def error(w: Array, free: int) -> float:
        best = math.inf
        for first in range(n + 1):
            for ends in cuts(first, free):
                total = (w[:first] * x[:first] ** 2).sum() + (w[ends[-1] :] * (1 - x[ends[-1] :]) ** 2).sum()
                for a, b in itertools.pairwise(ends):
                    mass = w[a:b].sum()
                    if mass > 0:
                        total += (w[a:b] * (x[a:b] - (w[a:b] * x[a:b]).sum() / mass) ** 2).sum()
                best = min(best, float(total))
        return best

    return min(error(halves[0], k) + error(halves[1], levels - 3 - k) for k in range(levels - 2))
