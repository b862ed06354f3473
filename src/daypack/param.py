"""What is decided once about a parameter (`ParamPlan`), and what a step knows of it (`ParamStep`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from daypack.formats.base import ComponentSpec, State, StateFormat
from daypack.formats.low_rank import Projection
from daypack.geometry import Geometry, chunks, geometry, read
from daypack.rules.base import Hyper, Moment, Rule


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter is stepped and how its moments are stored. Equal plans share a kernel.

    Attributes:
        rule: one of `daypack.rules`.
        formats: of each of the rule's moments, in their order; None: not kept.
        projection: the low-rank stage around the rule (GaLore); the moments then have the low shape.
    """

    rule: Rule
    formats: tuple[StateFormat | None, ...]
    projection: Projection | None = None

    def __post_init__(self) -> None:
        if len(self.formats) != len(self.rule.moments):
            names = ", ".join(moment.name for moment in self.rule.moments)
            raise ValueError(f"the rule {self.rule.name} has the moments {names}; got {len(self.formats)} formats")
        for moment, form in self.kept:
            if form.statistics and moment.decay is None:
                raise ValueError(f"{moment.name} of the rule {self.rule.name} is no average; it cannot be {form}")

    @cached_property
    def kept(self) -> tuple[tuple[Moment, StateFormat], ...]:
        """The moments that are kept, each with its format."""
        return tuple((m, form) for m, form in zip(self.rule.moments, self.formats, strict=True) if form is not None)

    @cached_property
    def stored(self) -> tuple[tuple[str, StateFormat], ...]:
        """State name and format of all that is stored: moments, and the basis of a projection."""
        moments = tuple((moment.name, form) for moment, form in self.kept)
        return (*moments, ("basis", self.projection)) if self.projection else moments

    @cached_property
    def statistics(self) -> tuple[tuple[Moment, StateFormat], ...]:
        """The moments that are kept as statistics, which are taken before anything moves."""
        return tuple((moment, form) for moment, form in self.kept if form.statistics)

    @property
    def measures(self) -> bool:
        """Whether the rule needs norms over the whole parameter before anything moves."""
        return self.rule.measured is not None and self.projection is None

    def format_of(self, moment: str) -> StateFormat | None:
        """Return the format of a moment; None if it is not kept, or if the rule has none of that name."""
        return next((form for name, form in self.stored if name == moment), None)

    def specs(self, shape: Sequence[int], dtype: torch.dtype, saved: bool = False) -> dict[str, ComponentSpec]:
        """Return the tensors of the state of a whole parameter by key, except ``step``.

        Args:
            saved: as ``state_dict()`` shows them, instead of as they are allocated.
        """
        view = self.view(shape)
        return {
            name + spec.suffix: spec
            for name, form in self.stored
            for spec in (form.saved(view, dtype) if saved else form.components(view, dtype))
        }

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of state of a parameter of this shape and dtype, without its step counter."""
        return sum(spec.nbytes for spec in self.specs(shape, dtype).values())

    def view(self, shape: Sequence[int]) -> Geometry:
        """Return the geometry that the formats work on: the parameter's, or with a projection the low shape's."""
        return geometry(self.projection.low if self.projection else tuple(shape))

    def shared_counts(self, view: Geometry) -> list[int]:
        """Return, for each of `statistics`, how many numbers of a shard's statistics are added up over all shards."""
        return [form.shared(view) for _, form in self.statistics]


@dataclass
class ParamStep:
    """One parameter in a step. It is kept from step to step, so values that may change are read from their source.

    Attributes:
        name: for messages only; it never enters the mathematics.
        param: this rank's part of the parameter; the parameter itself if it is not sharded.
        group: the parameter's group, with its options.
        state: this rank's part; empty before the first step.
        view: what ``plan.view`` says of the parameter's shape; of this rank's part of it.
        whole: the parameter as its group holds it.
        part: this rank's part of the gradient; None: the gradient is ``param.grad``.
        sums: complete statistics of this step by moment, as their formats laid them out (reference only).
        zero: whether the gradient is all zeros on every rank, where that is known.
    """

    name: str
    param: Tensor
    group: Mapping[str, Any]
    state: State
    plan: ParamPlan
    view: Geometry
    whole: Tensor
    part: Tensor | None = None
    sums: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    zero: bool | None = None

    @property
    def grad(self) -> Tensor:
        return cast(Tensor, self.param.grad) if self.part is None else self.part

    @property
    def steps(self) -> int:
        """Steps that this parameter has taken."""
        return int(self.state["step"]) if self.state else 0

    def hyper(self, step: int) -> Hyper:
        """Return the numbers of its ``step``-th step, from 1."""
        return self.plan.rule.at(self.group, step)

    def is_zero(self) -> bool:
        """Return whether every element of the gradient is zero: on all ranks where they have shared that, else on this
        one.
        """
        if self.zero is not None:
            return self.zero
        view = geometry(tuple(self.grad.shape))
        # Chunk by chunk, because any() of the whole would allocate a byte for each of its elements.
        return not any(bool(read(self.grad, view, chunk).any()) for chunk in chunks(view))
