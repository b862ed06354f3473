"""ADOPT: Adam that converges whatever its beta2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import Group, arguments, check_adamw, check_block_size, check_choice
from daypack.optim.plans import SECOND_MOMENTS, smallest_plan
from daypack.param import ParamPlan
from daypack.rules.adopt import ADOPT as RULE


class ADOPT(CompressedOptimizer):
    """ADOPT (Taniguchi et al. 2024, arXiv 2411.02853) at one byte of state per parameter.

    The gradient is divided by the root of a second moment that has not seen it, clipped to the fourth root of the steps
    taken so far, and only then averaged. Convergence does not depend on ``betas[1]``. The first step moves nothing: it
    takes in the first second moment. State of matrices, convolutions and experts, in bytes per parameter:

    ============================  ==============================  ===========================
    ..                            ``second_moment="dense"``       ``second_moment="factored"``
    ============================  ==============================  ===========================
    ``bits=32``                   8                               4
    ``bits=8``                    5                               1.02
    ============================  ==============================  ===========================

    Vectors and scalars keep fp32 moments.

    Args:
        params: parameters, named parameters or groups, as in torch. Names serve messages and matching at load.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as in
            `daypack.Gefen`, with the published defaults of betas and eps. ``weight_decay`` is decoupled.
        bits: 8 stores the first moment as 8-bit codes into a codebook learned from first gradients, 32 in fp32.
        second_moment: ``"factored"`` for row and column means of g^2, or ``"dense"``.
        block_size: elements of a row that share one scale of an 8-bit first moment.
        nonfinite: what to do with a parameter whose gradient is not finite: ``"skip"`` it or ``"raise"``.
        placement: ``"paged"`` keeps state outside the device's memory and brings it in for each parameter's turn: from
            memory-mapped files for parameters on a CPU (POSIX only), from pinned host memory on CUDA; docs/memory.md.
        spill_dir: directory of the memory-mapped files; None for the system's temporary directory.

    Raises:
        ValueError: an option is out of range or not supported; at a step, a gradient that cannot be used.

    Differs from the published code: weight decay is decoupled, as its own documentation advises, where the code couples
    it into the gradient by default; the first moment and the second one are compressed; steps run in the torch
    reference, which is slower than native kernels.
    """

    structural = ("bits", "second_moment", "block_size")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bits: int = 8,
        second_moment: Literal["factored", "dense"] = "factored",
        block_size: int = 256,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_adamw(group, where)
        check_choice(group, "bits", (8, 32), where)
        check_choice(group, "second_moment", tuple(SECOND_MOMENTS), where)
        check_block_size(group, where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan compressed moments for two and more dims, each where it takes fewer bytes than fp32."""
        return smallest_plan(RULE, tuple(shape), dtype, group["bits"], group["second_moment"], group["block_size"])
