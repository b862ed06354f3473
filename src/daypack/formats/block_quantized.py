"""A moment stored as 8-bit codes: one scale per block of a row, and a codebook that is learned or known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from daypack.calibration import codebook, maps
from daypack.calibration.codebook import GRID, LEVELS, MIN_GAP
from daypack.calibration.tools import Tools
from daypack.formats.base import Codes, ComponentSpec, State, StateFormat, not_squares
from daypack.geometry import Chunk, Geometry, accumulator, block_count, blocked, read, write_

#: Two irrational steps (powers of the plastic number, scaled to 32 bits) whose multiples fill the unit square evenly.
DITHER_INDEX, DITHER_STEP = 0xC13FA9A9, 0x91E10DA5


@dataclass(frozen=True)
class BlockQuantized(StateFormat):
    """1 byte per element and 2 bytes (4 with a fixed map) per block: ``value = codebook[code] * scale``.

    The scale is the block's absmax. Beside a learned codebook it is in bf16 rounded up, so that a normalised element
    never leaves [-1, 1]; beside a fixed map in fp32, as published; for fp64 parameters in fp64.
    A codebook of zeros has not been learned yet; it decodes to zero. Fixed maps store no codebook; an
    unsigned one, which holds a second moment, never stores 0 for a value that is not 0, because m is divided by it.

    Attributes:
        block_size: elements per scale; the last block of a row may be shorter and no block crosses a row.
        rounding: ``"dithered"`` rounds to one of the two neighbouring levels with a threshold that runs evenly through
            [0, 1) over elements and over steps: unbiased, without any random state, and the same on every rank.
            ``"nearest"`` has half the squared error in one step, but rounds a constant value the same way every time.
            Fixed maps are rounded to nearest.
        codebook: ``"learned"``, or the name of one of `daypack.calibration.maps.MAPS`.
    """

    block_size: int = 256
    rounding: Literal["dithered", "nearest"] = "dithered"
    codebook: str = "learned"

    def __post_init__(self) -> None:
        if self.codebook != "learned" and self.rounding != "nearest":
            raise ValueError(f"rounding must be 'nearest' with the fixed map {self.codebook!r}, got {self.rounding!r}")

    def _block(self, view: Geometry) -> int:
        return max(1, min(self.block_size, view.cols))

    def align(self, view: Geometry) -> int:
        return self._block(view)

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        learned = self.codebook == "learned"
        scale = torch.bfloat16 if learned and dtype != torch.float64 else accumulator(dtype)
        stored = (
            ComponentSpec("_codes", view.shape, torch.uint8),
            ComponentSpec("_scale", (*view.row_shape, block_count(view.cols, self._block(view))), scale),
        )
        book = ComponentSpec("_codebook", (LEVELS,), torch.float32, follows=False)
        return (*stored, book) if learned else stored

    def _levels(self, state: State, name: str, like: Tensor) -> Tensor:
        """Return the 256 levels, on the device of ``like`` and in its dtype."""
        if self.codebook == "learned":
            return state[name + "_codebook"].to(like.dtype)  # type: ignore[no-any-return]
        return maps.levels(self.codebook, like.device, like.dtype)

    def _scale(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        """Return the scales of the blocks under ``chunk``, a view ``[b, r, blocks]``."""
        block, (matrix, row, col) = self._block(view), chunk
        start, stop, _ = col.indices(view.cols)
        scale: Tensor = state[name + "_scale"].view(view.matrices, view.rows, -1)
        part: Tensor = scale[matrix, row, start // block : block_count(stop, block)]
        return part

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        codes = read(state[name + "_codes"], view, chunk)
        scale = self._scale(state, name, view, chunk)
        scale = scale.to(torch.float64 if scale.dtype == torch.float64 else torch.float32)
        levels = self._levels(state, name, scale)
        value: Tensor = levels.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        each = scale.repeat_interleave(self._block(view), dim=-1)[..., : codes.shape[-1]]
        return value.mul_(each)

    def encode_(self, state: State, name: str, view: Geometry, chunk: Chunk, value: Tensor, step: int) -> None:
        parts = blocked(value, self._block(view))
        stored = self._scale(state, name, view, chunk)
        absmax = parts.abs().amax(-1)
        stored.copy_(round_up_to_bfloat16(absmax) if stored.dtype == torch.bfloat16 else absmax)
        scale = stored.to(value.dtype)[..., None]
        unit = torch.where(scale > 0, parts / scale, 0).flatten(-2)[..., : value.shape[-1]].reshape(-1)
        if self.codebook != "learned":
            codes = maps.nearest(unit, self.codebook)
            if maps.is_unsigned(self.codebook):
                codes = torch.maximum(codes, (value > 0).reshape(-1))
        elif self.rounding == "nearest":
            codes = _nearest(unit, self._levels(state, name, unit))
        else:
            codes = _dithered(unit, self._levels(state, name, unit), dither(view, chunk, step, unit))
        write_(state[name + "_codes"], view, chunk, codes.view(value.shape))

    @property
    def lesson(self) -> str | None:
        return "codebook" if self.codebook == "learned" else None

    def learned(self, state: State, name: str) -> Tensor | None:
        return state[name + "_codebook"] if self.codebook == "learned" else None

    def gather(self, x: Tensor, view: Geometry, tools: Tools) -> Tensor:
        return tools.histogram(x, view, self.block_size)

    def solve(self, total: Tensor, view: Geometry, tools: Tools) -> Tensor:
        return codebook.learn(total, self.block_size, tools.optimal_levels)

    def calibrate_(self, state: State, name: str, view: Geometry, found: Tensor) -> bool:
        state[name + "_codebook"].copy_(found)
        return False

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        scale = state[name + "_scale"]
        if wrong := not_squares(name + "_scale", scale):
            return wrong
        if self.codebook != "learned":
            return None
        levels = state[name + "_codebook"]
        learned = bool(levels.any())
        if learned and not (
            levels[0] == -1
            and levels[-1] == 1
            and (levels == 0).any()
            and (levels.diff() >= MIN_GAP).all()
            and (levels * GRID == (levels * GRID).round()).all()
        ):
            return f"{name}_codebook is not 256 multiples of 1/{GRID} that rise from -1 through 0 to 1"
        if not learned and scale.any():
            return f"{name}_codebook is missing (all zeros) though {name}_scale is not: the codes cannot be read"
        return None

    def label(self, state: State, name: str) -> str:
        return f"8-bit {self.codebook.split()[-1]}/{self.block_size}"

    def codes(self, state: State, name: str, view: Geometry) -> Codes | None:
        def read_codes(chunk: Chunk) -> tuple[Tensor, Tensor]:
            return read(state[name + "_codes"], view, chunk), self._scale(state, name, view, chunk)

        levels = self._levels(state, name, torch.zeros(()))
        return Codes(view, read_codes, levels, self._block(view), self.rounding == "dithered")


def _dithered(x: Tensor, levels: Tensor, turns: Tensor) -> Tensor:
    """Return the codes of ``x`` in [-1, 1], rounded without bias: to the grid by the low half of ``turns``, then to a
    level.

    In whole numbers from the first line on, so that every kernel gets the same codes from the same ``x``.
    """
    fixed = x.mul(GRID * 65536.0).floor_().to(torch.int32)
    place = fixed.add_(turns.bitwise_and(0xFFFF)).bitwise_right_shift_(16)
    grid = (levels * GRID).to(torch.int32)
    codes = _count_below(place, grid[1:], place.bitwise_right_shift(2).add_(GRID >> 2), 4)
    gap = torch.nn.functional.pad(grid.diff(), (0, 1)).index_select(0, codes)
    limit = gap.mul_(turns.bitwise_right_shift(16).bitwise_and_(0xFFFF)).bitwise_right_shift_(16)
    codes += place.sub_(grid.index_select(0, codes)) > limit
    return codes


def _nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Return the codes of the levels nearest to ``x`` in [-1, 1]."""
    cells = round(1 / MIN_GAP)
    return _count_below(x, (levels[1:] + levels[:-1]) / 2, (x * cells).floor_().to(torch.int32).add_(cells), MIN_GAP)


def _count_below(x: Tensor, thresholds: Tensor, cell: Tensor, width: float) -> Tensor:
    """Count the ``thresholds`` (rising, at least ``width`` apart) at or below each ``x``; int32 ``[n]``.

    A table over cells of ``width``, numbered from the smallest possible ``x``, and one comparison for the only
    threshold that a cell can hold: five times faster than a binary search, whose branches are unpredictable here.
    """
    half = round(1 / MIN_GAP)
    edges = torch.arange(-half, half + 1, device=x.device).to(x.dtype) * width
    table = torch.bucketize(edges, thresholds, out_int32=True, right=True)
    count = table.index_select(0, cell)
    above = float("inf") if x.is_floating_point() else GRID + 1
    following = torch.nn.functional.pad(thresholds, (0, 1), value=above).index_select(0, count)
    return count.add_(x >= following)


def round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Return the smallest bfloat16 not below ``x`` (fp32, not negative, at most bfloat16's largest finite value)."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32).to(torch.bfloat16)


def dither(view: Geometry, chunk: Chunk, step: int, like: Tensor) -> Tensor:
    """Return rounding thresholds for the elements under ``chunk`` at ``step``, int32 ``[b, r, c]``: a fraction of 2^32
    each.

    ``index * a + step * b`` modulo 2^32, ``index`` the element's place in the whole parameter: it needs no
    state, does not depend on the world size, and replays exactly. Over successive steps one element's thresholds are a
    low-discrepancy sequence, so the rounding errors that a moving average adds up nearly cancel.
    """
    matrix, row, col = (part.indices(size)[0] for part, size in zip(chunk, view.view3, strict=True))
    first = (view.origin + (matrix * view.rows + row) * view.cols + col) * DITHER_INDEX + step * DITHER_STEP
    # A chunk is a contiguous run of elements. Integer products wrap around, which is the modulo that is meant.
    turns = torch.arange(like.numel(), dtype=torch.int32, device=like.device).mul_(_signed(DITHER_INDEX))
    return turns.add_(_signed(first)).view(like.shape)


def _signed(x: int) -> int:
    """Return ``x`` modulo 2^32 as the int32 with the same bits."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)
