"""What the codes of a quantised moment tell: blocks of zeros, saturation, use of the levels, expected error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daypack.checkpoint.snapshot import Coded
from daypack.formats.base import Codes
from daypack.geometry import Chunk, Geometry, blocked, chunks, geometry
from daypack.inspection.summary import Pool


@dataclass(frozen=True)
class CodeStats:
    """As in `daypack.inspection.result.MomentStats` and `Picture`; ``squared_error``: expected sum over elements."""

    blocks: int
    zero_blocks: int
    saturated: float
    squared_error: float
    histogram: Tensor
    scales: Tensor


def of_coded(coded: Coded) -> Codes | None:
    """Return the codes of another library's moment, as one row rounded to nearest; None if it has no 8-bit codes."""
    if coded.levels is None or coded.form != "8-bit":
        return None
    codes, scale = coded.codes.cpu().reshape(1, 1, -1), coded.scale.cpu().reshape(1, 1, -1)
    block = coded.block_size

    def read(chunk: Chunk) -> tuple[Tensor, Tensor]:
        start, stop, _ = chunk[2].indices(codes.shape[2])
        return codes[..., start:stop], scale[..., start // block : -(-stop // block)]

    return Codes(geometry((1, codes.shape[2])), read, coded.levels.cpu(), block, False)


def expected_errors(levels: Tensor, dithered: bool) -> Tensor:
    """Return the expected squared error of a value stored as each level, relative to the squared scale; fp64 ``[256]``.

    Values are taken to be spread evenly between neighbouring levels, at distances a and b of a level. Rounding to the
    nearest, those stored as it come from half of each gap, and the mean square is ``(a^3 + b^3) / (12 (a + b))``.
    Dithered, a value at distance t of gap b comes with probability ``1 - t / b``, which makes twice that.
    """
    gaps = levels.double().diff()
    a, b = (torch.nn.functional.pad(gaps, side) for side in ((1, 0), (0, 1)))
    return ((a**3 + b**3) / (12 * (a + b))).nan_to_num(0.0) * (2 if dithered else 1)


def code_stats(stored: Codes) -> CodeStats:
    """Measure codes, a chunk at a time."""
    levels, block, view = stored.levels.double(), stored.block_size, stored.view
    errors, used, end = expected_errors(levels, stored.dithered), levels != 0, stored.is_end()
    counts, squared, zero = torch.zeros(len(levels), dtype=torch.int64), 0.0, 0
    grid = geometry((view.matrices * view.rows, -(-view.cols // block)))
    pool = Pool(grid.rows, grid.cols)
    for chunk in chunks(view, block):
        found, scale = stored.read(chunk)
        codes, scale = found.long(), scale.double()
        counts += codes.reshape(-1).bincount(minlength=len(levels))
        live = (blocked(used[codes].to(torch.uint8), block).amax(-1) > 0) & (scale != 0)
        zero += int((~live).sum())
        scale = torch.where(scale.isfinite(), scale, 0)
        # One element of a block is its absmax, which the scale holds, at no error.
        exact = errors[-1] * blocked(end[codes].to(torch.uint8), block).amax(-1)
        squared += float(((blocked(errors[codes], block).sum(-1) - exact) * scale.square()).sum())
        pool.add(grid, (slice(None), _rows(chunk, view), _blocks(chunk, view, block)), scale.flatten(0, 1)[None])
    total, elements = grid.rows * grid.cols, view.matrices * view.rows * view.cols
    beyond, others = int(counts[end].sum()) - (total - zero), elements - (total - zero)
    saturated = max(0.0, beyond / others) if others else 0.0
    return CodeStats(total, zero, saturated, squared, counts, pool.mean())


def _rows(chunk: Chunk, view: Geometry) -> slice:
    """Return the rows of ``chunk``, counted over the rows of all matrices."""
    (matrix, last, _), (row, stop, _) = chunk[0].indices(view.matrices), chunk[1].indices(view.rows)
    return slice(matrix * view.rows + row, (last - 1) * view.rows + stop)


def _blocks(chunk: Chunk, view: Geometry, block: int) -> slice:
    start, stop, _ = chunk[2].indices(view.cols)
    return slice(start // block, -(-stop // block))
