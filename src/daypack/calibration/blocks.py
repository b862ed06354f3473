"""Which blocks of a row share a second moment: found from the first squared gradient (Gefen, arXiv 2606.13894)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from daypack.geometry import CHUNK_ELEMENTS, Geometry, accumulator, block_count, blocked, chunks, read

#: Every block size that the search may choose is a multiple of this many elements, the unit of the saved form.
FINEST = 16
#: Block size where a row has no better one: 4 bytes in 256 elements.
DEFAULT = 256
_SMALLEST_DEFAULT = 64
_LARGE = 1024
_LOG_FLOOR = 1e-12


@lru_cache(maxsize=4096)
def candidates(cols: int) -> tuple[int, ...]:
    """Return the block sizes to compare for rows of ``cols`` elements, rising: proper divisors that are multiples of
    `FINEST`. Empty where there is nothing to search: rows that `FINEST` does not divide, and rows longer than one
    chunk.

    Empty where there is nothing to search: rows that `FINEST` does not divide, and rows longer than one chunk.
    """
    if cols % FINEST or cols > CHUNK_ELEMENTS:
        return ()
    return tuple(size for size in range(FINEST, cols // 2 + 1, FINEST) if cols % size == 0)


@lru_cache(maxsize=4096)
def default_block_size(cols: int) -> int:
    """Return the block size of a row without structure: the whole row up to 256, else its largest divisor from 64 to
    256 (a multiple of `FINEST` where sizes are searched for), else 256 with a shorter last block.
    """
    if cols <= DEFAULT:
        return max(cols, 1)
    unit = finest_block_size(cols)
    divisors = [size for size in range(_SMALLEST_DEFAULT, DEFAULT + 1) if cols % size == 0 and size % unit == 0]
    return max(divisors, default=DEFAULT)


def finest_block_size(cols: int) -> int:
    """Return the elements per column of the saved form, which depend on the shape alone; 1 where no size is searched
    for.
    """
    return FINEST if candidates(cols) else 1


def find_block_size(grad: Tensor, view: Geometry) -> int:
    """Return the period of log g^2 along the rows of ``grad``, or `default_block_size` where none stands out.

    ``score(P)`` is the mean of ``|c[k+1] - c[k]|`` over neighbouring blocks of one row, ``c[k]`` the mean of
    ``log(g^2 + 1e-12)`` over block k: it peaks where blocks line up with the structure. The highest interior local
    maximum over the sorted candidates wins; one above 1,024 gives way to its smallest candidate divisor above 1,024.

    Differs from the published search, which runs over the flattened tensor: differences stay within a row (so that
    they add up over row shards), block sizes are multiples of 16, and no structure means 256 instead of 1.
    """
    return block_size_from_scores(view.cols, block_scores(grad, view))


def block_size_from_scores(cols: int, scores: Sequence[float]) -> int:
    """Return the size that `find_block_size` chooses, given a score for each of the `candidates`."""
    sizes = candidates(cols)
    if len(sizes) < 3:
        return default_block_size(cols)
    peaks = [i for i in range(1, len(sizes) - 1) if scores[i] > scores[i - 1] and scores[i] > scores[i + 1]]
    if not peaks:
        return default_block_size(cols)
    best = sizes[max(peaks, key=lambda i: scores[i])]
    return next((size for size in sizes if size > _LARGE and best % size == 0), best)


def block_scores(grad: Tensor, view: Geometry) -> list[float]:
    """Return the score of each of the `candidates`, a mean over the rows that are here; zeros if there are no rows."""
    sizes = candidates(view.cols)
    totals = torch.zeros(len(sizes), dtype=torch.float64, device=grad.device)
    for chunk in chunks(view):
        g = read(grad, view, chunk).to(accumulator(grad.dtype))
        fine = blocked(g.square().add_(_LOG_FLOOR).log_(), FINEST).mean(-1)
        for i, size in enumerate(sizes):
            totals[i] += blocked(fine, size // FINEST).mean(-1).diff(dim=-1).abs().sum(dtype=torch.float64)
    rows = max(view.matrices * view.rows, 1)
    return [
        total / (rows * (block_count(view.cols, size) - 1)) for total, size in zip(totals.tolist(), sizes, strict=True)
    ]
