"""Gefen: AdamW at one byte of state per parameter."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from daypack.formats.base import StateFormat, smallest
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.formats.factored import Factored
from daypack.geometry import geometry
from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import Group, arguments, check_adamw, check_block_size, check_choice
from daypack.param import ParamPlan
from daypack.rules.adamw import ADAMW

GEFEN_SECOND_MOMENTS: dict[str, StateFormat] = {"factored": Factored(), "blocks": BlockMean()}


class Gefen(CompressedOptimizer):
    """Drop-in for `torch.optim.AdamW` with an eighth of its state (Benedek, Koren & Fried 2026, arXiv 2606.13894).

    AdamW's rule, arguments and defaults; what changes is how the moments are stored:

    ====================================  ===========================================  ========================
    parameter                             first moment                                 second moment
    ====================================  ===========================================  ========================
    matrix, convolution, experts          8-bit codes into one learned codebook,       ``second_moment``
                                          a bf16 scale per ``block_size`` elements
    vector, scalar, or a matrix so small  fp32                                         fp32
    that fp32 takes fewer bytes
    ====================================  ===========================================  ========================

    The codebook is learned once, from the first gradients, by exact dynamic programming. All arithmetic is fp32
    (fp64 for fp64 parameters); the parameter is rounded once, at the write.

    Args:
        params: parameters, named parameters or groups, as in torch. Names serve messages and matching at load.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as in
            `torch.optim.AdamW`, except that amsgrad, capturable and differentiable raise when True, foreach has no
            effect, and fused chooses the kernel: None the fastest available, True a fused one or an error, False the
            torch reference.
        second_moment: ``"factored"`` keeps row and column means of g^2, ``"blocks"`` (the paper's) one mean per block,
            the block size found from the first gradient.
        block_size: elements of a row that share one scale of the first moment.
        nonfinite: what to do with a parameter whose gradient is not finite: ``"skip"`` it (it stays as it is, warned of
            once, counted in ``skipped``) or ``"raise"`` before anything changes.
        bits: bits per element of the first moment; 8.
        placement: ``"paged"`` keeps state outside the device's memory and brings it in for each parameter's turn: from
            memory-mapped files for parameters on a CPU (POSIX only), from pinned host memory on CUDA; docs/memory.md.
        spill_dir: directory of the memory-mapped files; None for the system's temporary directory.

    Raises:
        ValueError: an option is out of range or not supported; at a step, a gradient that cannot be used.

    Differs from the published code: the update reads the first moment before it is rounded for storage; storage rounds
    with a dither instead of to the nearest level; weight decay defaults to AdamW's 0.01 instead of 0; factored second
    moment by default; vectors keep AdamW's own moments; blocks never cross a row.
    """

    structural = ("second_moment", "block_size", "bits")
    partition_caveat = "does not know the rows of a flat partition: ZeRO's gets flat blocks, FSDP1's AdamW's moments"

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
        second_moment: Literal["factored", "blocks"] = "factored",
        block_size: int = 256,
        nonfinite: Literal["skip", "raise"] = "skip",
        bits: int = 8,
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_adamw(group, where)
        check_choice(group, "second_moment", tuple(GEFEN_SECOND_MOMENTS), where)
        check_block_size(group, where)
        check_choice(group, "bits", (8,), where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan compressed moments for two and more dims, where they take fewer bytes than fp32; else AdamW's own."""
        return _plan(tuple(shape), dtype, group["second_moment"], group["block_size"])

    def plan_partition(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan codes and one second moment per block of the flat piece, because its rows and columns are not known."""
        return ParamPlan(ADAMW, (BlockQuantized(group["block_size"]), BlockMean()))


@lru_cache(maxsize=4096)
def _plan(shape: tuple[int, ...], dtype: torch.dtype, second_moment: str, block_size: int) -> ParamPlan:
    """Return `Gefen.plan` as a function of its options, cached, because every step asks for it."""
    view, dense = geometry(shape), Dense()
    m = smallest(view, dtype, dense, BlockQuantized(block_size)) if len(shape) > 1 else dense
    v = m if m == dense else smallest(view, dtype, dense, GEFEN_SECOND_MOMENTS[second_moment])
    return ParamPlan(ADAMW, (m, v))
