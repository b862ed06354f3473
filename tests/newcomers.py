"""A rule and a format that the package does not know, and an optimizer of each, as CONTRIBUTING says to write them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import daypack
from daypack.formats.base import Codes, ComponentSpec, State, StateFormat, not_squares, smallest
from daypack.formats.dense import Dense
from daypack.formats.factored import Factored
from daypack.geometry import Chunk, Geometry, block_count, blocked, geometry, read, write_
from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import arguments, check_adamw, check_choice
from daypack.optim.plans import SECOND_MOMENTS, smallest_plan
from daypack.param import ParamPlan
from daypack.rules.adamw import ADAMW, MOMENTS
from daypack.rules.base import ADAMW_OPTIONS, Elements, Rule, decoupled

LEVELS = torch.linspace(-1, 1, 15)


@dataclass(frozen=True)
class Nibbles(StateFormat):
    """Half a byte an element: two codes a byte within a row, 15 even levels, a bf16 scale for 64 elements."""

    block_size: int = 64

    def _block(self, view: Geometry) -> int:
        return min(self.block_size, view.cols + view.cols % 2)

    def align(self, view: Geometry) -> int:
        return self._block(view)

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        return (
            ComponentSpec("_nibbles", (*view.row_shape, block_count(view.cols, 2)), torch.uint8),
            ComponentSpec("_scale", (*view.row_shape, block_count(view.cols, self._block(view))), torch.bfloat16),
        )

    def _parts(self, state: State, name: str, view: Geometry, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Codes and scales under a chunk; scales are a view."""
        start, stop, _ = chunk[2].indices(view.cols)
        packed = read(state[name + "_nibbles"], _halved(view), (*chunk[:2], slice(start // 2, block_count(stop, 2))))
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., : stop - start]
        scale = state[name + "_scale"].view(view.matrices, view.rows, -1)
        block = self._block(view)
        return codes, scale[chunk[0], chunk[1], start // block : block_count(stop, block)]

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        codes, scale = self._parts(state, name, view, chunk)
        each = scale.float().repeat_interleave(self._block(view), -1)[..., : codes.shape[-1]]
        # A code of 0 is a fresh state's: it stands for 0, and codes of levels count from 1.
        return torch.where(codes > 0, LEVELS[(codes.long() - 1).clamp_min(0)], 0.0) * each

    def encode_(self, state: State, name: str, view: Geometry, chunk: Chunk, value: Tensor, step: int) -> None:
        start, stop, _ = chunk[2].indices(view.cols)
        parts = blocked(value.float(), self._block(view))
        _, scale = self._parts(state, name, view, chunk)
        scale.copy_(parts.abs().amax(-1) * 1.01)
        unit = torch.where(scale[..., None] > 0, parts / scale[..., None].float(), 0).flatten(-2)[..., : stop - start]
        codes = (unit.clamp(-1, 1).mul(7).round() + 8).to(torch.uint8)
        pairs = blocked(codes, 2)
        place = (*chunk[:2], slice(start // 2, block_count(stop, 2)))
        write_(state[name + "_nibbles"], _halved(view), place, pairs[..., 0] | (pairs[..., 1] << 4))

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        return not_squares(name + "_scale", state[name + "_scale"])

    def label(self, state: State, name: str) -> str:
        return f"4-bit even/{self.block_size}"

    def codes(self, state: State, name: str, view: Geometry) -> Codes | None:
        def codes(chunk: Chunk) -> tuple[Tensor, Tensor]:
            found, scale = self._parts(state, name, view, chunk)
            return torch.where(found > 0, found - 1, 7), scale

        return Codes(view, codes, LEVELS, self._block(view), False)


def _halved(view: Geometry) -> Geometry:
    """The geometry of a tensor with one byte for two elements of a row."""
    return Geometry((*view.row_shape, block_count(view.cols, 2)), view.batched, view.whole, view.start)


class Gefen4(daypack.Gefen):
    """Gefen with half a byte for the first moment of matrices."""

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: dict[str, Any], name: str) -> ParamPlan:
        if len(shape) < 2:
            return ParamPlan(ADAMW, (Dense(), Dense()))
        view, dense = geometry(tuple(shape)), Dense()
        return ParamPlan(ADAMW, (smallest(view, dtype, dense, Nibbles()), smallest(view, dtype, dense, Factored())))


def _rectified(x: Elements) -> Tensor:
    """RAdam (Liu et al. 2019): AdamW's direction times the rectification, or the average alone while v is unsure."""
    beta2, step = x.hyper.beta2, x.hyper.step
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / x.hyper.bias_correction2
    mean = x.new("exp_avg") / x.hyper.bias_correction1
    if length <= 5:
        return mean
    rect = ((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) ** 0.5
    return mean.mul_(rect * x.hyper.bias_correction2**0.5).div_(x.new("exp_avg_sq").sqrt().add_(x.hyper.eps))


RADAM = Rule("radam", MOMENTS, _rectified, decoupled, ADAMW_OPTIONS)


class RAdam(CompressedOptimizer):
    """RAdam in the formats of LAMB."""

    structural = ("bits", "second_moment", "block_size")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        bits: int = 8,
        second_moment: str = "factored",
        block_size: int = 256,
        nonfinite: str = "skip",
        placement: str = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: dict[str, Any], where: str) -> None:
        check_adamw(group, where)
        check_choice(group, "second_moment", tuple(SECOND_MOMENTS), where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: dict[str, Any], name: str) -> ParamPlan:
        return smallest_plan(RADAM, tuple(shape), dtype, group["bits"], group["second_moment"], group["block_size"])


NEWCOMERS: dict[str, type[CompressedOptimizer]] = {"radam": RAdam, "gefen4": Gefen4}
