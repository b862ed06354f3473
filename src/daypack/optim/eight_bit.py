"""Optimizers whose moments are 8-bit codes into fixed maps (Dettmers et al. 2021, arXiv 2110.02861)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from daypack import sharding
from daypack.formats.base import smallest
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.geometry import geometry
from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import (
    Group,
    arguments,
    check_adamw,
    check_betas,
    check_block_size,
    check_choice,
    check_common,
    check_flags,
    check_not_negative,
    check_number,
    check_positive,
)
from daypack.param import ParamPlan
from daypack.rules.adamw import ADAM, ADAMW
from daypack.rules.base import Rule
from daypack.rules.lion import LION
from daypack.rules.sgd import SGD

Map: TypeAlias = Literal["dynamic", "linear", "companded", "learned"]
#: Codebooks of the first and of the second moment.
CODEBOOKS = {name: (f"signed {name}", f"unsigned {name}") for name in ("dynamic", "linear", "companded")}
CODEBOOKS["learned"] = ("learned", "unsigned dynamic")


class EightBit(CompressedOptimizer):
    """What the 8-bit optimizers share.

    A parameter of at least ``min_8bit_size`` elements, counted on its global shape, keeps its moments as 8-bit codes
    with a scale (the absmax, fp32) for each ``block_size`` elements of a row. In fp32 stay smaller parameters, vectors
    (but not the flat partitions of ZeRO), parameters of a group with ``bits=32``, embeddings (a group marked
    ``embedding=True``, as `daypack.param_groups` marks them), and matrices of rows so short that codes and scales would
    take more. For fp64 parameters scales and dense moments are fp64.

    The update reads the fresh moments in fp32; they are rounded, to the nearest level, only to be stored. A second
    moment that is not 0 is never stored as 0, and 0 is a level of every map.

    Options that all of them add to their namesake's:
        map: the 256 levels. ``"dynamic"`` are bitsandbytes' own; ``"linear"`` are evenly spaced, ``"companded"`` evenly
            spaced on the scale of the square root (of ``m`` and of ``sqrt(v)`` both); ``"learned"`` learns those of the
            first moment from the first gradients, as `daypack.Gefen` does, with bf16 scales.
        block_size: elements of a row that share one scale.
        min_8bit_size: parameters of fewer elements stay in fp32.
        bits: 8, or 32 to leave the parameters of a group in fp32.
        nonfinite: ``"skip"`` a parameter whose gradient is not finite, or ``"raise"`` before anything changes.
        placement, spill_dir: as in `daypack.Gefen`.

    ``foreach`` has no effect; ``fused`` chooses the kernel: None the fastest available, True a fused one or an error,
    False the torch reference. ``amsgrad``, ``capturable`` and ``differentiable`` raise when True.
    """

    structural = ("bits", "map", "block_size", "min_8bit_size")
    rule: ClassVar[Rule]

    def check_options(self, group: Group, where: str) -> None:
        check_choice(group, "bits", (8, 32), where)
        check_choice(group, "map", tuple(CODEBOOKS), where)
        check_block_size(group, where)
        check_positive(group, "min_8bit_size", where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan codes for both moments where the parameter is large enough and they take fewer bytes, else fp32.

        Vectors stay in fp32: their shards, cut anywhere, would cut blocks.
        """
        wide = len(shape) < 2 or bool(group.get("embedding"))
        return self._coded(shape, dtype, {**group, "bits": 32} if wide else group)

    def plan_partition(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan codes with flat blocks for the piece, which is never cut."""
        return self._coded(shape, dtype, group)

    def _coded(self, shape: torch.Size, dtype: torch.dtype, group: Group) -> ParamPlan:
        wide = group["bits"] == 32 or prod(shape) < group["min_8bit_size"]
        codebooks = () if wide else CODEBOOKS[group["map"]]
        return _plan(self.rule, tuple(shape), dtype, codebooks, group["block_size"])

    def caveat(self, param: Tensor, group: Group, name: str) -> str | None:
        if not sharding.is_fsdp1_piece(param):
            return None
        return "keeps fp32 moments of flat pieces of FSDP1, which saves only such; fully_shard (FSDP2) saves 8 bits too"


@lru_cache(maxsize=4096)
def _plan(rule: Rule, shape: tuple[int, ...], dtype: torch.dtype, codebooks: tuple[str, ...], block: int) -> ParamPlan:
    view, dense = geometry(shape), Dense()
    if not codebooks:
        return ParamPlan(rule, tuple(dense for _ in rule.moments))
    coded = (BlockQuantized(block, "nearest", codebooks[moment.squares]) for moment in rule.moments)
    return ParamPlan(rule, tuple(smallest(view, dtype, dense, form) for form in coded))


class AdamW8bit(EightBit):
    """`torch.optim.AdamW` with both moments in 8 bits: 2.03 bytes of state per parameter instead of 8.

    Signature, defaults and rule are AdamW's; for the other options, and for what stays in fp32, see `EightBit`.

    Differs from bitsandbytes: blocks never cross a row; the second moment of a coordinate that has had a gradient is
    never stored as 0; ``weight_decay`` defaults to torch's 0.01; all arithmetic is fp32 (fp64 for fp64 parameters) with
    one rounding of the parameter; embeddings are recognised by their group instead of by a global override.
    """

    rule = ADAMW

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        map: Map = "dynamic",
        block_size: int = 256,
        min_8bit_size: int = 4096,
        bits: Literal[8, 32] = 8,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_adamw(group, where)
        super().check_options(group, where)


class Adam8bit(EightBit):
    """`torch.optim.Adam` with both moments in 8 bits: 2.03 bytes of state per parameter instead of 8.

    Signature, defaults and rule are Adam's: weight decay, 0 by default, is part of the gradient (bitsandbytes' Adam8bit
    decouples it). For everything else see `AdamW8bit` and `EightBit`.
    """

    rule = ADAM

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        map: Map = "dynamic",
        block_size: int = 256,
        min_8bit_size: int = 4096,
        bits: Literal[8, 32] = 8,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_adamw(group, where)
        super().check_options(group, where)


class SGD8bit(EightBit):
    """`torch.optim.SGD` with its momentum in 8 bits: 1.02 bytes of state per parameter instead of 4.

    Signature, defaults and rule are SGD's, with the gradient itself as the buffer of the first step. The buffer is kept
    as ``exp_avg``, also with ``momentum=0``, so that a schedule may raise it; `torch.optim.SGD` keeps nothing then. For
    the other options, and for what stays in fp32, see `EightBit`.

    Differs from bitsandbytes: dampening and Nesterov's momentum work; blocks never cross a row.
    """

    rule = SGD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        map: Map = "dynamic",
        block_size: int = 256,
        min_8bit_size: int = 4096,
        bits: Literal[8, 32] = 8,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_common(group, where)
        check_not_negative(group, ("momentum",), where)
        check_flags(group, ("nesterov",), where)
        check_number(group, "dampening", where)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError(
                f"nesterov=True of {where} needs a momentum above 0 and no dampening, got "
                f"momentum={group['momentum']!r}, dampening={group['dampening']!r}"
            )
        super().check_options(group, where)


class Lion8bit(EightBit):
    """Lion (Chen et al. 2023, arXiv 2302.06675) with its momentum in 8 bits: 1.02 bytes of state per parameter.

    The update is the sign of ``b1 m + (1 - b1) g``, then ``m = b2 m + (1 - b2) g``; weight decay is decoupled.
    Rates are 3 to 10 times smaller than AdamW's and decay as much larger. For the other options, and for what stays in
    fp32, see `EightBit`.
    """

    rule = LION

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        map: Map = "dynamic",
        block_size: int = 256,
        min_8bit_size: int = 4096,
        bits: Literal[8, 32] = 8,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_common(group, where)
        check_betas(group, where)
        super().check_options(group, where)
