"""A second moment stored as one mean of g^2 per block of a row (Gefen's published form, arXiv 2606.13894)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from daypack.calibration.blocks import block_size_from_scores, candidates, default_block_size, finest_block_size
from daypack.calibration.tools import Tools
from daypack.formats.base import ComponentSpec, State, StateFormat, not_squares
from daypack.geometry import Chunk, Geometry, accumulator, block_count, blocked


@dataclass(frozen=True)
class BlockMean(StateFormat):
    """4 bytes per block; the block size is found from the first gradient and kept as ``<name>_block_size``.

    The live tensor has one column per block. ``state_dict()`` repeats it to one column per
    `daypack.calibration.blocks.FINEST` elements, so that the saved shape follows from the parameter's shape and not
    from what was found.
    """

    statistics: ClassVar[bool] = True

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        return self._specs(view, dtype, default_block_size(view.cols))

    def saved(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        unit = finest_block_size(view.cols)
        return self._specs(view, dtype, unit if unit > 1 else default_block_size(view.cols))

    def _specs(self, view: Geometry, dtype: torch.dtype, size: int) -> tuple[ComponentSpec, ...]:
        means = ComponentSpec("_block", (*view.row_shape, block_count(view.cols, size)), accumulator(dtype))
        # A tensor, because distributed checkpoints do not load Python numbers in place. 0 is the default block size.
        return means, ComponentSpec("_block_size", (), torch.int64, follows=False)

    def _size(self, state: State, name: str, view: Geometry) -> int:
        return int(state.get(name + "_block_size", 0)) or default_block_size(view.cols)

    def align(self, view: Geometry) -> int:
        return default_block_size(view.cols)  # only rows longer than a chunk are cut, and those are not searched

    def sums(self, state: State, name: str, view: Geometry, like: Tensor) -> tuple[Tensor, ...]:
        size = self._size(state, name, view)
        blocks = block_count(view.cols, size)
        # The second entry carries the block size to `observe`, which sees no state.
        return like.new_zeros(view.matrices, view.rows, blocks), torch.tensor(size)

    def observe(self, sums: tuple[Tensor, ...], view: Geometry, chunk: Chunk, squared: Tensor) -> None:
        size = int(sums[1])
        sums[0][chunk[0], chunk[1], self._blocks(view, chunk, size)] += blocked(squared, size).sum(-1)

    def combine(self, state: State, name: str, view: Geometry, sums: tuple[Tensor, ...], beta: float) -> None:
        mean, size = state[name + "_block"], self._size(state, name, view)
        counts = torch.full((mean.shape[-1],), size, dtype=mean.dtype, device=mean.device)
        counts[-1] = view.cols - size * (mean.shape[-1] - 1)
        mean.lerp_(sums[0].div_(counts).view(mean.shape), 1 - beta)

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        size = self._size(state, name, view)
        mean = state[name + "_block"].view(view.matrices, view.rows, -1)
        part: Tensor = mean[chunk[0], chunk[1], self._blocks(view, chunk, size)]
        start, stop, _ = chunk[2].indices(view.cols)
        return part.repeat_interleave(size, dim=-1)[..., : stop - start]

    def _blocks(self, view: Geometry, chunk: Chunk, size: int) -> slice:
        start, stop, _ = chunk[2].indices(view.cols)
        return slice(start // size, block_count(stop, size))

    def _units(self, view: Geometry, size: int) -> int:
        """Return the columns of the saved form per live block."""
        unit = finest_block_size(view.cols)
        return size // unit if unit > 1 else 1

    def save(self, state: State, name: str, view: Geometry) -> dict[str, Any]:
        units = self._units(view, self._size(state, name, view))
        width = self.saved(view, torch.float32)[0].shape[-1]
        return {name + "_block": state[name + "_block"].repeat_interleave(units, dim=-1)[..., :width]}

    def load_(self, state: State, name: str, view: Geometry) -> None:
        block, size = state[name + "_block"], self._size(state, name, view)
        if block.shape[-1] != block_count(view.cols, size):
            state[name + "_block"] = block[..., :: self._units(view, size)].contiguous()

    def learned(self, state: State, name: str) -> Tensor | None:
        mean: Tensor = state[name + "_block"]
        return mean

    def gather(self, x: Tensor, view: Geometry, tools: Tools) -> Tensor:
        """Return the sum of the scores of all block sizes over the local rows, and the number of these rows."""
        scores = torch.tensor([*tools.block_scores(x, view), 1.0], dtype=torch.float64, device=x.device)
        return scores.mul_(view.matrices * view.rows)

    def solve(self, total: Tensor, view: Geometry, tools: Tools) -> Tensor:
        *sums, rows = total.tolist()
        return torch.tensor(block_size_from_scores(view.cols, [part / rows for part in sums]))

    def calibrate_(self, state: State, name: str, view: Geometry, found: Tensor) -> bool:
        """Start over with blocks of the size that was found and a mean of 0."""
        like, size = state[name + "_block"], int(found)
        state[name + "_block"] = like.new_zeros(*view.row_shape, block_count(view.cols, size))
        state[name + "_block_size"].fill_(size)
        return True

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        block, size = state[name + "_block"], self._size(state, name, view)
        if not state[name + "_block_size"] and block.any():
            return f"{name}_block_size is 0 (not found yet) though {name}_block is not all zeros"
        if size not in (*candidates(view.cols), default_block_size(view.cols)):
            return f"{name}_block_size is {size}; rows of {view.cols} elements have no such blocks"
        return not_squares(name + "_block", block)

    def label(self, state: State, name: str) -> str:
        return f"mean/{int(state[name + '_block_size']) or 'block'}"

    def means(self, state: State, name: str) -> Tensor | None:
        mean: Tensor = state[name + "_block"]
        return mean
