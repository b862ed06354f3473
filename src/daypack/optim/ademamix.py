"""AdEMAMix: AdamW with a second, slow moving average of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import (
    Group,
    arguments,
    check_betas,
    check_block_size,
    check_choice,
    check_common,
    check_not_negative,
    check_positive,
)
from daypack.optim.plans import SECOND_MOMENTS, smallest_plan
from daypack.param import ParamPlan
from daypack.rules.ademamix import ADEMAMIX as RULE


class AdEMAMix(CompressedOptimizer):
    """AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137) at two bytes of state per parameter instead of twelve.

    AdamW whose update adds ``alpha`` times an average over tens of thousands of gradients to the usual one. State of
    matrices, convolutions and experts, in bytes per parameter:

    ============================  ==============================  ===========================
    ..                            ``second_moment="dense"``       ``second_moment="factored"``
    ============================  ==============================  ===========================
    ``bits=32``                   12                              8
    ``bits=8``                    6                               2.03
    ============================  ==============================  ===========================

    Vectors and scalars keep fp32 moments.

    Args:
        params: parameters, named parameters or groups, as in torch. Names serve messages and matching at load.
        lr, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as in `daypack.Gefen`.
        betas: decays of the fast average, of the second moment and of the slow average.
        alpha: weight of the slow average.
        alpha_warmup: steps over which alpha rises from 0 in a straight line; None: it does not.
        beta3_warmup: steps over which ``betas[2]`` rises from ``betas[0]``, evenly in half-lives; None: it does not.
            The paper warms both up over the whole run: a slow average that starts at once may diverge.
        bits: 8 stores both averages as 8-bit codes into a codebook learned from first gradients, 32 in fp32.
        second_moment: ``"factored"`` for row and column means of g^2, or ``"dense"``.
        block_size: elements of a row that share one scale of an 8-bit average.
        nonfinite: what to do with a parameter whose gradient is not finite: ``"skip"`` it or ``"raise"``.
        placement: ``"paged"`` keeps state outside the device's memory and brings it in for each parameter's turn: from
            memory-mapped files for parameters on a CPU (POSIX only), from pinned host memory on CUDA; docs/memory.md.
        spill_dir: directory of the memory-mapped files; None for the system's temporary directory.

    Raises:
        ValueError: an option is out of range or not supported; at a step, a gradient that cannot be used.

    Differs from the published code: ``alpha`` is the paper's 5 (the authors' torch code has 2, their optax code 5);
    weight decay defaults to AdamW's 0.01; steps run in the torch reference, which is slower than native kernels.
    """

    structural = ("bits", "second_moment", "block_size")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        alpha: float = 5.0,
        alpha_warmup: int | None = None,
        beta3_warmup: int | None = None,
        bits: int = 8,
        second_moment: Literal["factored", "dense"] = "factored",
        block_size: int = 256,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_common(group, where)
        check_not_negative(group, ("eps", "alpha"), where)
        check_betas(group, where, 3)
        for option in ("alpha_warmup", "beta3_warmup"):
            if group[option] is not None:
                check_positive(group, option, where)
        check_choice(group, "bits", (8, 32), where)
        check_choice(group, "second_moment", tuple(SECOND_MOMENTS), where)
        check_block_size(group, where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan compressed moments for two and more dims, each where it takes fewer bytes than fp32."""
        return smallest_plan(RULE, tuple(shape), dtype, group["bits"], group["second_moment"], group["block_size"])
