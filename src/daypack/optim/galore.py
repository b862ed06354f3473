"""GaLore: any optimizer's rule on a low-rank stand-in of each matrix."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from daypack.formats.low_rank import project
from daypack.optim.base import CompressedOptimizer
from daypack.optim.inner import Inner, inner_names, optimizer_of
from daypack.optim.options import (
    Group,
    arguments,
    check_adamw,
    check_choice,
    check_not_negative,
    check_positive,
)
from daypack.param import ParamPlan

#: Options of GaLore that the inner optimizer takes over where it has them.
INNER_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
#: Options of inner optimizers that read the parameter itself, which a stand-in is not, or override the learning rate.
NEUTRAL = (("scale_parameter", False), ("relative_step", False))
#: What makes no sense around a stand-in, why, and what to take.
UNFIT_INNER = {
    "galore": "a stand-in is not projected again; take inner='adamw' or 'gefen'",
    "lamb": "its step is as long as the parameter, and a stand-in starts at zero; take inner='adamw', or daypack.LAMB",
    "muon": "it needs the matrix itself, which a stand-in is not; take inner='adamw', or daypack.Muon",
    "adam_mini": "its heads and neurons are rows of the parameter, which a stand-in has not; take inner='gefen', whose "
    "second moment is shared too, or daypack.AdamMini",
}
#: Where projecting a matrix saves nothing, there is a warning only if it has at least this many elements.
WORTH_SAYING = 4096


class GaLore(CompressedOptimizer):
    """Low-rank projected state (Zhao et al. 2024, arXiv 2403.03507) around AdamW or another of our optimizers.

    A matrix whose group has a ``rank`` is stepped through a stand-in of ``rank x max(rows, cols)`` elements: the
    gradient through its leading singular vectors on the shorter side; see `daypack.projection.Projection`. The state
    is the inner optimizer's for the stand-in, plus the basis: ``8 rank max + 4 rank min`` bytes around AdamW, 3 per
    parameter of a square matrix at a quarter of its rank and 1.5 at an eighth; ``1.02 rank max + 4 rank min`` around
    Gefen, 0.63 at an eighth. Above a fifth of its rank Gefen's own 1.02 is less, and the matrix steps whole.

    Everything else runs the inner optimizer plainly: groups without a rank, vectors, three and more dims (convolutions,
    stacked experts), and matrices for which the low-rank state would not be smaller, which is warned of once. These
    step at ``lr``; what is projected steps at ``scale`` times it, as in galore-torch, where parameters of groups
    without a rank take the plain rate too. Where few matrices of a group are projected, no single lr suits both:
    give a rank only to groups of large matrices, or use ``scale=1`` with a lower lr.

    Args:
        params: parameters, named parameters or groups, as in torch. Names serve messages and matching at load.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as in
            `daypack.Gefen`. ``weight_decay`` is decoupled and applies to the whole parameter.
        inner: ``"adamw"`` or the name of another of our optimizers, ``"gefen"`` for instance.
        inner_options: options of the inner optimizer that have no counterpart here, such as ``{"block_size": 128}``.
        rank: directions that are kept, at most the shorter side; None: the group is not projected, and if none is,
            a warning says so.
        update_proj_gap: gradients (finite and not all zero) of a parameter that one basis serves.
        scale: factor of the projected update (the paper's alpha).
        nonfinite: what to do with a parameter whose gradient is not finite: ``"skip"`` it or ``"raise"``.
        placement: ``"paged"`` keeps state outside the device's memory and brings it in for each parameter's turn: from
            memory-mapped files for parameters on a CPU (POSIX only), from pinned host memory on CUDA; docs/memory.md.
        spill_dir: directory of the memory-mapped files; None for the system's temporary directory.

    Raises:
        ValueError: an option is out of range or not supported; at a step, a gradient that cannot be used.

    Differs from galore-torch: decay precedes the update, as in AdamW; the basis comes from the Gram matrix in fp64 with
    signs fixed, so that replicas on like machines agree, and is saved; eps is AdamW's (after bias correction). As
    there, the moments stay as they are when the basis changes. Inner Adafactor takes lr as it is (no relative step, no
    parameter scale).

    Memory: a step holds two stand-ins of one parameter, its basis once more and half a MiB for each thread; a new
    basis takes about three matrices of ``min(rows, cols)^2`` fp64 numbers for the time of its decomposition.

    Flat partitions have no rows and columns and are never projected; see docs/guide.md.
    """

    structural = ("inner", "inner_options", "rank")
    partition_caveat = "does not project it (the inner optimizer steps it whole, at its own bytes per element)"

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
        inner: str = "adamw",
        inner_options: dict[str, Any] | None = None,
        rank: int | None = None,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        super().__init__(params, arguments(locals()))
        if all(group["rank"] is None for group in self.param_groups):
            alone = "torch.optim.AdamW" if inner == "adamw" else f"daypack.create({inner!r}, ...)"
            warnings.warn(
                "GaLore projects nothing: no group has a rank, so that it takes as much state as its inner optimizer "
                f"{inner!r}; give groups of matrices a rank, such as an eighth of their shorter side, or use {alone}",
                stacklevel=2,
            )

    def check_options(self, group: Group, where: str) -> None:
        check_adamw(group, where)
        unfit = UNFIT_INNER.get(group["inner"]) if isinstance(group["inner"], str) else None
        if unfit:
            raise ValueError(f"inner={group['inner']!r} of {where} does not fit: {unfit}")
        check_choice(group, "inner", inner_names(UNFIT_INNER), where)
        if group["rank"] is not None:
            check_positive(group, "rank", where)
        check_positive(group, "update_proj_gap", where)
        check_not_negative(group, ("scale",), where)
        _inner(group, where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Return the inner optimizer's plan, for the low shape where that takes fewer bytes."""
        inner = _inner(group)
        whole, projection = inner.plan(shape, dtype, group, name), project(tuple(shape), group["rank"])
        if projection is None:
            return whole
        low = replace(inner.plan(torch.Size(projection.low), dtype, group, name), projection=projection)
        return low if low.nbytes(shape, dtype) < whole.nbytes(shape, dtype) else whole

    def plan_partition(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Return the inner optimizer's plan for the flat piece."""
        return _inner(group).plan(shape, dtype, group, name, flat=True)

    def caveat(self, param: Tensor, group: Group, name: str) -> str | None:
        shape = tuple(param.shape)
        plan = self.plan(param.shape, param.dtype, group, name)
        if param.numel() >= WORTH_SAYING and project(shape, group["rank"]) and plan.projection is None:
            return (
                f"would save nothing at rank {group['rank']} (basis and low-rank state together) and steps whole, at "
                "the full learning rate and not at `scale` of it; give a rank to groups of larger matrices alone"
            )
        if group["rank"] is not None:
            return super().caveat(param, group, name)
        inner = _inner(group)
        optimizer = optimizer_of(inner)
        return optimizer.caveat(param, inner.group(group), name) if isinstance(optimizer, CompressedOptimizer) else None


def _inner(group: Group, where: str = "a parameter group") -> Inner:
    """Return the inner optimizer of ``group``, checked."""
    return Inner.of(group, "inner", INNER_OPTIONS, NEUTRAL, where)
