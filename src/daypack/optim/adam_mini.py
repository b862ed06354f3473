"""Adam-mini: AdamW with one second moment for each block of parameters that belong together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from daypack.formats.base import StateFormat, smallest
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.formats.line_mean import group_count
from daypack.geometry import geometry
from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import (
    Group,
    arguments,
    check_adamw,
    check_choice,
    check_patterns,
    check_positive,
    plain_name,
)
from daypack.optim.partition import Choice, KnownHeads, Partition, check_partition, choose_rule, form_of, of_model
from daypack.param import ParamPlan
from daypack.rules.adamw import ADAMW


class AdamMini(CompressedOptimizer):
    """AdamW with one second moment for each block (Zhang et al. 2024, arXiv 2406.16793): 4 bytes per parameter.

    With ``bits=8`` the first moment is 8-bit codes, as in `daypack.Gefen`, and the state takes 1.02 bytes.

    ==========================================  =============================================================
    parameter                                   elements that share a second moment
    ==========================================  =============================================================
    query and key                               a head
    value, attention output, MLP, other         a row (a column of GPT-2's transposed ``Conv1D``): an output
    matrices, convolutions, experts             neuron, a channel
    embedding, output head                      a row: a token
    vector, scalar                              none
    ==========================================  =============================================================

    The state holds one fp32 number per row, ``exp_avg_sq_row`` (or column, ``exp_avg_sq_col``), and each row holds the
    mean of g^2 over its whole block.

    Args:
        params: a model, whose module types and configuration say what its parameters are; or what
            `daypack.param_groups` made of a model, which knows the model; or parameters, named parameters or groups as
            in torch, of which only names and shapes are known. `partition_report` shows what was decided.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: as in
            `daypack.Gefen`.
        partition: (pattern, rule) pairs that come before everything else; the first pattern (as in `fnmatch`, on the
            parameter's name) that matches decides. Rules are ``dense``, ``tensor``, ``row``, ``column``, ``head:64``,
            ``row:768x64,768x64,768x1``; see `daypack.optim.partition`. What a model says is appended.
        num_heads, head_dim: of the attention, where there is no model that says it: number of query heads, elements
            of a head. One is enough, unless heads times their size is not the hidden size; key and value heads follow
            from the shapes.
        value: ``"row"``, or ``"tensor"`` for one second moment in each value matrix, which the paper found to converge
            faster in runs of less than 10,000 steps.
        bits: 32, or 8 for a first moment in 8 bits.
        nonfinite, placement, spill_dir: as in `daypack.Gefen`.

    Raises:
        ValueError: an option is out of range, or a rule does not fit its parameter.

    Differs from the published code: groups stay the caller's own; names decide only as whole parts (``key`` does not
    match ``monkey``), after module types and configuration; norms keep a second moment per element instead of one;
    weight decay defaults to AdamW's 0.01 and reaches all that its group holds; all arithmetic is fp32.
    """

    partition_caveat = "does not know what a flat partition holds: ZeRO's gets flat blocks, FSDP1's AdamW's moments"
    structural = ("bits", "partition", "num_heads", "head_dim", "value")

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
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
        partition: Sequence[Sequence[str]] = (),
        num_heads: int | None = None,
        head_dim: int | None = None,
        value: Literal["row", "tensor"] = "row",
        bits: Literal[8, 32] = 32,
        nonfinite: Literal["skip", "raise"] = "skip",
        placement: Literal["resident", "paged"] = "resident",
        spill_dir: str | None = None,
    ) -> None:
        partition = _complete(params, partition, KnownHeads(num_heads, head_dim, value))
        params = params.named_parameters() if isinstance(params, nn.Module) else params
        super().__init__(params, arguments(locals()))
        self._check_patterns()
        self._say_what_is_guessed()

    def check_options(self, group: Group, where: str) -> None:
        check_adamw(group, where)
        check_partition(group["partition"], where)
        for option in ("num_heads", "head_dim"):
            if group[option] is not None:
                check_positive(group, option, where)
        check_choice(group, "value", ("row", "tensor"), where)
        check_choice(group, "bits", (8, 32), where)

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan the second moment that the parameter's rule says; a first moment in 8 bits if that takes fewer bytes."""
        return _plan(tuple(shape), dtype, group["bits"], self._choice(shape, group, name).rule, name)

    def plan_partition(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Plan one second moment per block of the flat piece, because its parameters are not known."""
        return ParamPlan(ADAMW, (BlockQuantized() if group["bits"] == 8 else Dense(), BlockMean()))

    def _choice(self, shape: torch.Size, group: Group, name: str) -> Choice:
        partition: Partition = tuple(map(tuple, group["partition"]))
        return choose_rule(
            name, tuple(shape), partition, KnownHeads(group["num_heads"], group["head_dim"], group["value"])
        )

    def partition_report(self) -> PartitionReport:
        """Report which elements share a second moment, and why; ``str()`` of the result is a table."""
        entries = []
        for group, name, p in self._params():
            choice, view = self._choice(p.shape, group, name), geometry(tuple(p.shape))
            form = form_of(choice.rule, tuple(p.shape), name)
            blocks = view.matrices * group_count(form.segments) if form else p.numel()
            entries.append(ParamPartition(name, tuple(p.shape), choice.rule, blocks, choice.why))
        return PartitionReport(tuple(entries))

    def _check_patterns(self) -> None:
        """Check that every pattern the user gave matches a parameter; entries from a model have a third part."""
        given = [entry[0] for group in self.param_groups for entry in group["partition"] if len(entry) == 2]
        check_patterns(given, [plain_name(name) for _, name, _ in self._params()], "the pattern of partition")

    def _say_what_is_guessed(self) -> None:
        guessed: dict[str, list[str]] = {}
        for group, name, p in self._params():
            if self._choice(p.shape, group, name).guessed:
                given = (f"{option}={group[option]}" for option in ("num_heads", "head_dim") if group[option])
                guessed.setdefault(", ".join(given), []).append(f"{name} {tuple(p.shape)}")
        for options, names in guessed.items():
            problem = f"finds no heads for {options} in" if options else "does not know the heads of"
            remedy = "a number that fits" if options else "the model itself, or num_heads, or head_dim"
            warnings.warn(
                f"AdamMini {problem} {', '.join(names)}: their rows have second moments of their own; pass {remedy}",
                stacklevel=3,
            )


@dataclass(frozen=True)
class ParamPartition:
    """One parameter: its rule, how many second moments it has, and why."""

    name: str
    shape: tuple[int, ...]
    rule: str
    blocks: int
    why: str


@dataclass(frozen=True)
class PartitionReport:
    """The partition of every parameter; ``str()`` of it is a table."""

    entries: tuple[ParamPartition, ...]

    def __str__(self) -> str:
        rows = [("parameter", "shape", "rule", "blocks", "why")]
        rows += [
            (e.name, "x".join(map(str, e.shape)) or "scalar", e.rule, f"{e.blocks:,}", e.why) for e in self.entries
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        elements = sum(prod(e.shape) for e in self.entries)
        lines.append(f"total: {sum(e.blocks for e in self.entries):,} second moments for {elements:,} elements")
        return "\n".join(lines)


def _complete(params: object, partition: Sequence[Sequence[str]], known: KnownHeads) -> Partition:
    """Return ``partition`` followed by what the model behind ``params`` says, if there is one."""
    check_partition(partition, "AdamMini")
    given = tuple(map(tuple, partition))
    model = params if isinstance(params, nn.Module) else getattr(params, "model", None)
    if not isinstance(model, nn.Module):
        return given
    return given + tuple(entry for entry in of_model(model, known) if entry not in given)


@lru_cache(maxsize=4096)
def _plan(shape: tuple[int, ...], dtype: torch.dtype, bits: int, rule: str, name: str) -> ParamPlan:
    view, dense = geometry(shape), Dense()
    m: StateFormat = smallest(view, dtype, dense, BlockQuantized()) if bits == 8 and len(shape) > 1 else dense
    return ParamPlan(ADAMW, (m, form_of(rule, shape, name) or dense))
