"""What the codes of a quantised moment tell: blocks of zeros, saturation, use of the levels, expected error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from daypack.calibration import maps
from daypack.calibration.codebook import LEVELS
from daypack.checkpoint.snapshot import Coded
from daypack.formats.base import Geometry, blocked, chunks, geometry
from daypack.formats.block_quantized import BlockQuantized
from daypack.inspection.survey import Pool


@dataclass(frozen=True)
class Codes:
    """8-bit codes as they are stored, in rows within which blocks are counted.

    Attributes:
        codes: uint8 ``[rows, cols]``.
        scale: ``[rows, blocks]``, floating point.
        levels: ``[256]``, rising.
        block_size: elements per scale; the last block of a row may be shorter.
        dithered: whether values were rounded up or down by chance instead of to the nearest level.
    """

    codes: Tensor
    scale: Tensor
    levels: Tensor
    block_size: int
    dithered: bool


@dataclass(frozen=True)
class CodeStats:
    """As in `daypack.inspection.result.MomentStats` and `Picture`; ``squared_error``: expected sum over elements."""

    blocks: int
    zero_blocks: int
    saturated: float
    squared_error: float
    histogram: Tensor
    scales: Tensor


def of_format(form: BlockQuantized, state: Mapping[str, Any], key: str, view: Geometry) -> Codes:
    """The codes of a moment of ours."""
    learned = form.learned(dict(state), key)
    return Codes(
        state[key + "_codes"].reshape(-1, view.cols),
        state[key + "_scale"].reshape(view.matrices * view.rows, -1),
        maps.levels(form.codebook) if learned is None else learned,
        form.align(view),
        form.rounding == "dithered",
    )


def of_coded(coded: Coded) -> Codes | None:
    """The codes of another library's moment: one row, rounded to nearest; None if they are no 8-bit codes to levels."""
    if coded.levels is None or coded.form != "8-bit" or coded.levels.numel() != LEVELS:
        return None
    codes, scale = coded.codes.cpu().reshape(1, -1), coded.scale.cpu().reshape(1, -1)
    return Codes(codes, scale, coded.levels.cpu(), coded.block_size, False)


def expected_errors(levels: Tensor, dithered: bool) -> Tensor:
    """Expected squared error of a value that was stored as each level, in units of the squared scale; fp64 ``[256]``.

    Values are taken to be spread evenly between neighbouring levels, at distances a and b of a level. Rounding to the
    nearest, those stored as it come from half of each gap, and the mean square is ``(a^3 + b^3) / (12 (a + b))``.
    Dithered, a value at distance t of gap b comes with probability ``1 - t / b``, which makes twice that.
    """
    gaps = levels.double().diff()
    a, b = (torch.nn.functional.pad(gaps, side) for side in ((1, 0), (0, 1)))
    return ((a**3 + b**3) / (12 * (a + b))).nan_to_num(0.0) * (2 if dithered else 1)


def code_stats(stored: Codes) -> CodeStats:
    """Measure codes, a chunk at a time."""
    levels, block = stored.levels.double(), stored.block_size
    rows, cols = stored.codes.shape
    errors, used, end = expected_errors(levels, stored.dithered), levels != 0, torch.zeros(LEVELS, dtype=torch.bool)
    end[-1], end[0] = True, bool(levels[0] < 0)
    counts, squared, zero = torch.zeros(LEVELS, dtype=torch.int64), 0.0, 0
    view = geometry((rows, cols))
    pool, grid = Pool(*stored.scale.shape), geometry(tuple(stored.scale.shape))
    for chunk in chunks(view, block):
        codes = stored.codes[chunk[1], chunk[2]].long()
        start = (chunk[2].start or 0) // block
        scale = stored.scale[chunk[1], start : start + -(-codes.shape[1] // block)].double()
        counts += codes.reshape(-1).bincount(minlength=LEVELS)
        live = (blocked(used[codes].to(torch.uint8), block).amax(-1) > 0) & (scale != 0)
        zero += int((~live).sum())
        scale = torch.where(scale.isfinite(), scale, 0)
        # One element of a block is its absmax, which the scale holds, at no error.
        exact = errors[-1] * blocked(end[codes].to(torch.uint8), block).amax(-1)
        squared += float(((blocked(errors[codes], block).sum(-1) - exact) * scale.square()).sum())
        blocks = slice(start, start + scale.shape[1])
        pool.add(grid, (slice(None), chunk[1], blocks), scale[None])
    total = stored.scale.numel()
    beyond, others = int(counts[end].sum()) - (total - zero), rows * cols - (total - zero)
    saturated = max(0.0, beyond / others) if others else 0.0
    return CodeStats(total, zero, saturated, squared, counts, pool.mean())
