"""Muon: momentum in one byte, made orthogonal; no second moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from daypack.formats.base import smallest
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.geometry import geometry
from daypack.optim.base import CompressedOptimizer
from daypack.optim.groups import param_groups
from daypack.optim.inner import Inner, inner_names
from daypack.optim.options import (
    Group,
    arguments,
    check_block_size,
    check_choice,
    check_common,
    check_flags,
    check_not_negative,
    check_number,
    check_patterns,
    check_positive,
    plain_name,
)
from daypack.param import ParamPlan
from daypack.rules.base import Rule
from daypack.rules.muon import MUON

#: Options that the optimizer beside Muon takes over.
BESIDE_OPTIONS = ("lr", "weight_decay", "maximize")
#: What cannot stand beside it, and why.
UNFIT_BESIDE = {
    "muon": "it is this optimizer; take beside='gefen' or 'adamw'",
    "galore": "it is put around others itself; take beside='gefen' or 'adamw'",
}
#: Names of linear layers that are output heads where a model does not say which is.
_OUTPUT_HEADS = ("lm_head", "head", "classifier", "output", "score", "embed_out")


class Muon(CompressedOptimizer):
    """`torch.optim.Muon` (Jordan et al. 2024) at 1.01 bytes of state per parameter: training without a second moment.

    The update of a hidden matrix is its momentum with all singular values brought to about 1. Everything else is
    stepped by another optimizer, ``beside``, in the same groups:

    ==============================================================  ==========================================
    parameter                                                       stepped by
    ==============================================================  ==========================================
    two and more dims (a convolution as ``[d0, rest]``, stacked     Muon, with 8-bit momentum
    experts as one matrix each)
    vector, scalar; embeddings and output heads, as far as a        ``beside``: Gefen (1.02 bytes per parameter
    model says which they are; groups with ``embedding=True`` or    in matrices), AdamW, or another of ours
    ``use_muon=False``; names that match ``beside_names``
    ==============================================================  ==========================================

    Args:
        params: `daypack.param_groups(model)` or the model itself, which says what embeddings and output heads are (for
            the model itself, nothing but ``weight_decay`` decays); or parameters, named parameters or groups, as in
            torch: these do not tell, so name what Muon is not meant for, or put it into groups of its own.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in `torch.optim.Muon`; ``eps`` is the
            least norm that momentum is divided by. ``weight_decay`` is decoupled.
        adjust_lr_fn: ``"match_rms_adamw"`` gives updates the RMS of AdamW's, so that one learning rate and decay, those
            of AdamW, serve all parameters; ``"original"`` is Jordan's ``sqrt(max(1, rows / cols))``, and wants a group
            of its own for each of the two rates.
        ns_dtype: in which Newton-Schulz runs: ``"bfloat16"``, as published, or ``"float32"``; of fp64 parameters fp64.
        beside: name of the optimizer for everything but hidden matrices.
        beside_options: its options beside lr, weight_decay and maximize, such as ``{"betas": (0.9, 0.95)}``.
        beside_names: patterns of names of further parameters for ``beside``, such as ``("lm_head.*",)``; what a model
            says is appended.
        use_muon: False leaves all parameters of a group to ``beside``.
        bits: 8 stores momentum as 8-bit codes into a codebook learned from first gradients, 32 in fp32.
        block_size: elements of a row that share one scale of 8-bit momentum.
        maximize, foreach, fused: as in `daypack.Gefen`. Steps of matrices run in the torch reference.
        nonfinite: what to do with a parameter whose gradient is not finite: ``"skip"`` it or ``"raise"``.
        placement: ``"paged"`` keeps state outside the device's memory and brings it in for each parameter's turn: from
            memory-mapped files for parameters on a CPU (POSIX only), from pinned host memory on CUDA; docs/memory.md.
        spill_dir: directory of the memory-mapped files; None for the system's temporary directory.

    Raises:
        ValueError: an option is out of range or not supported; at a step, a gradient that cannot be used.

    Differs from torch: momentum is kept in 8 bits; parameters of more than two dims are taken; ``adjust_lr_fn``
    defaults to AdamW's RMS; Newton-Schulz starts from momentum normalised in fp32.

    Sharded parameters (`fully_shard`): each rank gathers the direction of one matrix at a time and makes all of it
    orthogonal, so that steps do not depend on the number of ranks; state stays sharded. That costs the traffic of one
    more gather of the matrices and the same products on every rank; stacked experts are whole where they are.

    Memory: a step holds the direction of one parameter in fp32, and four matrices of its size in ``ns_dtype``.

    Flat partitions (ZeRO, FSDP1) have no matrices: ``beside`` steps them.
    """

    structural = ("bits", "block_size", "beside", "beside_options", "beside_names", "use_muon")
    partition_caveat = "does not know the matrices of a flat partition: the optimizer beside it steps it"

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        *,
        ns_dtype: Literal["bfloat16", "float32"] = "bfloat16",
        beside: str = "gefen",
        beside_options: dict[str, Any] | None = None,
        beside_names: Sequence[str] = (),
        use_muon: bool = True,
        bits: int = 8,
        block_size: int = 256,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        options = arguments(locals())
        if isinstance(params, nn.Module):
            params = param_groups(params, float(weight_decay))
        model = getattr(params, "model", None)
        if isinstance(model, nn.Module):
            options["beside_names"] = (*beside_names, *head_names(model))
        super().__init__(params, options)
        check_patterns(beside_names, [plain_name(name) for _, name, _ in self._params()], "the pattern of beside_names")

    def check_options(self, group: Group, where: str) -> None:
        check_common(group, where)
        check_not_negative(group, ("eps",), where)
        check_flags(group, ("nesterov", "use_muon"), where)
        check_positive(group, "ns_steps", where)
        check_choice(group, "adjust_lr_fn", ("match_rms_adamw", "original"), where)
        check_choice(group, "ns_dtype", ("bfloat16", "float32"), where)
        check_choice(group, "bits", (8, 32), where)
        check_block_size(group, where)
        if not 0 <= check_number(group, "momentum", where) < 1:
            raise ValueError(f"momentum of {where} must lie in [0, 1), got {group['momentum']!r}")
        coefficients = group["ns_coefficients"]
        if not isinstance(coefficients, Sequence) or isinstance(coefficients, str) or len(coefficients) != 3:
            raise ValueError(f"ns_coefficients of {where} must be three numbers, got {coefficients!r}")
        for value in coefficients:
            check_number({"ns_coefficients": value}, "ns_coefficients", where)
        if (unfit := UNFIT_BESIDE.get(str(group["beside"]))) is not None:
            raise ValueError(f"beside={group['beside']!r} of {where} does not fit: {unfit}")
        check_choice(group, "beside", inner_names(UNFIT_BESIDE), where)
        if isinstance(group["beside_names"], str) or not all(isinstance(each, str) for each in group["beside_names"]):
            raise ValueError(f"beside_names of {where} must be a list of patterns, got {group['beside_names']!r}")
        _beside(group, where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan momentum alone for hidden matrices, and what the optimizer beside plans for everything else."""
        other = group.get("embedding") is True or not group["use_muon"]
        if len(shape) < 2 or other or any(fnmatchcase(plain_name(name), each) for each in group["beside_names"]):
            return _beside(group).plan(shape, dtype, group, name)
        return _plan(tuple(shape), dtype, group["bits"], group["block_size"])

    def plan_partition(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Return what the optimizer beside plans for a flat piece."""
        return _beside(group).plan(shape, dtype, group, name, flat=True)

    def main_rule(self, group: Group) -> Rule:
        return MUON


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that turn hidden states into outputs: those of ``model.get_output_embeddings()``,
    else of linear layers called ``lm_head``, ``head``, ``classifier``, ``output``, ``score`` or ``embed_out``.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    names = []
    for name, module in model.named_modules():
        known = isinstance(module, nn.Linear) and name.rpartition(".")[2] in _OUTPUT_HEADS
        if module is output if isinstance(output, nn.Module) else known:
            names += [f"{name}.{key}" if name else key for key, _ in module.named_parameters()]
    return tuple(names)


def _beside(group: Group, where: str = "a parameter group") -> Inner:
    return Inner.of(group, "beside", BESIDE_OPTIONS, where=where)


@lru_cache(maxsize=4096)
def _plan(shape: tuple[int, ...], dtype: torch.dtype, bits: int, block_size: int) -> ParamPlan:
    dense = Dense()
    return ParamPlan(
        MUON, (smallest(geometry(shape), dtype, dense, BlockQuantized(block_size)) if bits == 8 else dense,)
    )
