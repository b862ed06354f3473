"""Adafactor: a factored second moment, and a first moment only where one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import (
    Group,
    arguments,
    check_block_size,
    check_choice,
    check_common,
    check_not_negative,
    number,
)
from daypack.optim.plans import smallest_plan
from daypack.param import ParamPlan
from daypack.rules.adafactor import ADAFACTOR


class Adafactor(CompressedOptimizer):
    """`torch.optim.Adafactor` (Shazeer & Stern 2018, arXiv 1804.04235), with an optional first moment.

    The gradient is divided by the root of a second moment that is kept as row and column means of g^2; the result is
    clipped as a whole to an RMS of ``d``, and its step is ``lr`` times the RMS of the parameter.

    ==============================  =============================================  =======================
    parameter                       second moment                                  bytes per parameter
    ==============================  =============================================  =======================
    ``[rows, cols]``                ``rows + cols`` numbers                        4 (rows + cols) / (rows cols):
                                                                                   0.002 at 4096 x 4096
    convolution, three and more     as ``[d0, rest]`` or as matrices of the last   less than 0.1 for most
    dims                            two dims, whichever keeps fewer numbers
    vector, scalar, one row or      one number per element                         4
    column
    ==============================  =============================================  =======================

    A first moment (``beta1``) adds 4 bytes, or 1.01 with ``bits=8`` (matrices only).

    Args:
        params: parameters, named parameters or groups, as in torch. Names serve messages and matching at load.
        lr, beta2_decay, eps, d, weight_decay, foreach, maximize: as in `torch.optim.Adafactor`; ``eps[0]`` None is the
            machine epsilon of the arithmetic (fp32, or fp64 for fp64 parameters); foreach has no effect.
        beta1: decay of a moving average of the clipped update, which is then stepped in its place; None: none is kept.
            It averages directions, not steps: a later change of lr reaches all of it.
        bits: 8 stores the first moment as 8-bit codes into a codebook learned from first gradients, 32 in fp32.
        block_size: elements of a row that share one scale of an 8-bit first moment.
        relative_step: True bounds lr by ``1 / sqrt(step)``, as torch does; False leaves it as it is given.
        scale_parameter: True scales the step by ``max(eps[1], RMS(p))``, as torch does; False does not.
        fused: chooses the kernel: None the fastest available, True a fused one or an error, False the torch reference.
        nonfinite: what to do with a parameter whose gradient is not finite: ``"skip"`` it or ``"raise"``.
        placement: ``"paged"`` keeps state outside the device's memory and brings it in for each parameter's turn: from
            memory-mapped files for parameters on a CPU (POSIX only), from pinned host memory on CUDA; docs/memory.md.
        spill_dir: directory of the memory-mapped files; None for the system's temporary directory.

    Raises:
        ValueError: an option is out of range or not supported; at a step, a gradient that cannot be used.

    Differs from torch: more than two dims are factored by our geometry instead of over the last two; ``eps[0]`` bounds
    the root of the second moment alone, where torch also uses it (not squared) as the least mean of the row means,
    which makes gradients below 3e-4 look larger than they are; all arithmetic is fp32 and rounds once.

    Flat partitions: a vector has no rows to share and no norm of the whole; see docs/guide.md.
    """

    structural = ("beta1", "bits", "block_size")
    partition_caveat = "keeps a whole second moment (4 bytes per element) and clips by the norm of the partition alone"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        beta1: float | None = None,
        bits: int = 32,
        block_size: int = 256,
        relative_step: bool = True,
        scale_parameter: bool = True,
        fused: bool | None = None,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))

    def check_options(self, group: Group, where: str) -> None:
        check_common(group, where)
        for option in ("relative_step", "scale_parameter"):
            check_choice(group, option, (True, False), where)
        check_choice(group, "bits", (8, 32), where)
        check_block_size(group, where)
        if number(group["beta2_decay"], "beta2_decay", where) > 0:
            raise ValueError(f"beta2_decay of {where} must not be positive, got {group['beta2_decay']!r}")
        if number(group["d"], "d", where) < 1:
            raise ValueError(f"d of {where} must be at least 1, got {group['d']!r}")
        if group["beta1"] is not None and not 0 <= number(group["beta1"], "beta1", where) < 1:
            raise ValueError(f"beta1 of {where} must be None or lie in [0, 1), got {group['beta1']!r}")
        eps = group["eps"]
        if not isinstance(eps, Sequence) or isinstance(eps, str) or len(eps) != 2:
            raise ValueError(f"eps of {where} must be two numbers (the first may be None), got {eps!r}")
        for value in eps if eps[0] is not None else eps[1:]:
            check_not_negative({"eps": value}, ("eps",), where)
        if eps[0] is not None and float(eps[0]) == 0:
            raise ValueError(
                f"eps of {where} must be positive or None in the first place, got {eps!r}: 0 / 0 is no step"
            )

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan a factored second moment for two and more dims, where it takes fewer bytes than fp32 elements."""
        plan = smallest_plan(ADAFACTOR, tuple(shape), dtype, group["bits"], "factored", group["block_size"])
        return plan if group["beta1"] is not None else _without_average(plan)


@lru_cache(maxsize=4096)
def _without_average(plan: ParamPlan) -> ParamPlan:
    return replace(plan, formats=(None, *plan.formats[1:]))
