"""What is decided once about a parameter (`ParamPlan`), what one step needs to know (`Hyper`), and the unit of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from daypack.formats.base import geometry

if TYPE_CHECKING:
    from daypack.formats.base import Geometry, State, StateFormat
    from daypack.projection import Projection


@dataclass(frozen=True)
class Hyper:
    """The numbers of one step, read from the group's options at that step by the rule's own `Rule.hyper`.

    Attributes:
        step: the step being taken, from 1.
        lr: factor of the direction.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: as the rule uses it.
        weight_decay: as the rule uses it; the parameter itself is scaled by ``1 - shrink``.
        maximize: ascend.
        shrink: decoupled weight decay times its learning rate.
        coupled: weight decay that is added to the gradient, times the parameter.
        options: the group, for what only one rule knows.
    """

    step: int
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    maximize: bool = False
    shrink: float = 0.0
    coupled: float = 0.0
    options: Mapping[str, Any] | None = None

    @property
    def bias_correction1(self) -> float:
        return 1 - self.beta1**self.step

    @property
    def bias_correction2(self) -> float:
        return 1 - self.beta2**self.step

    def seen(self, g: Tensor, p: Tensor) -> Tensor:
        """What the rule takes for the gradient: turned round if it ascends, with coupled decay. May be ``g`` itself."""
        g = -g if self.maximize else g
        return g.add(p, alpha=self.coupled) if self.coupled else g

    def option(self, name: str) -> Any:
        return (self.options or {})[name]


@dataclass(frozen=True)
class Elements:
    """What a rule sees of some elements of a parameter: tensors of one shape, fp32 (fp64 for fp64 parameters).

    Attributes:
        p: the parameter before the step.
        g: its gradient, turned round if the rule ascends, with coupled weight decay.
        m: the first moment BEFORE this step's gradient; None if the plan keeps none.
        v: the second moment AFTER it; None if the plan keeps none.
    """

    p: Tensor
    g: Tensor
    m: Tensor | None
    v: Tensor | None


@dataclass(frozen=True)
class Norms:
    """Euclidean norms over a whole parameter of ``numel`` elements: its own, and that of what its rule measures."""

    param: float
    measured: float
    numel: int


#: (elements, hyper, norms) -> direction and the first moment to store (None: there is none). Both are new tensors, or
#: the same one. ``norms`` is None for rules that measure nothing.
Direction: TypeAlias = "Callable[[Elements, Hyper, Norms | None], tuple[Tensor, Tensor | None]]"


@dataclass(frozen=True)
class Rule:
    """An update rule: ``p <- p * (1 - shrink) - lr * direction``. Pure formulas, blind to how moments are stored.

    Attributes:
        name: for messages.
        direction: see `Direction`.
        hyper: numbers of a step from the group's options and the step, from 1.
        measured: for rules that scale a whole tensor: what the norm is taken of. It costs a pass of its own.
        options: makes of a group the options that ``hyper`` reads, where the group is another optimizer's; None: those
            of the group itself.
    """

    name: str
    direction: Direction
    hyper: Callable[[Mapping[str, Any], int], Hyper]
    measured: Callable[[Elements, Hyper], Tensor] | None = None
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def read(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options of ``group`` as ``hyper`` reads them."""
        return self.options(group) if self.options else group

    def at(self, group: Mapping[str, Any], step: int) -> Hyper:
        """The numbers of the ``step``-th step (from 1) of a parameter in ``group``."""
        return self.hyper(self.read(group), step)

    @property
    def plain(self) -> Rule:
        """The rule that reads its options from a group as it is; kernels know it."""
        return replace(self, options=None) if self.options else self


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter is stepped and how its moments are stored. Equal plans share a kernel.

    Attributes:
        rule: one of `daypack.rules`.
        exp_avg: format of the first moment; None: not kept.
        exp_avg_sq: format of the second moment; None: not kept.
        projection: the low-rank stage around the rule (GaLore); the moments then have the low shape.
    """

    rule: Rule
    exp_avg: StateFormat | None
    exp_avg_sq: StateFormat | None
    projection: Projection | None = None

    @property
    def moments(self) -> tuple[tuple[str, StateFormat], ...]:
        """State name and format of each moment that is kept, and of the basis of a projection."""
        kept = ("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq), ("basis", self.projection)
        return tuple((name, form) for name, form in kept if form is not None)

    @property
    def measures(self) -> bool:
        """Whether the rule needs norms over the whole parameter before anything moves."""
        return self.rule.measured is not None and self.projection is None

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of state of a parameter of this shape and dtype, without its step counter."""
        specs = (spec for _, form in self.moments for spec in form.components(self.view(shape), dtype))
        return sum(spec.nbytes for spec in specs)

    def view(self, shape: Sequence[int]) -> Geometry:
        """What the formats take for the parameter's geometry: that of the low shape where there is a projection."""
        return geometry(self.projection.low if self.projection else tuple(shape))


@dataclass
class Update:
    """One parameter on its way through a step. Kept from step to step, so what may change is read where it stands.

    Attributes:
        name: for messages only; it never enters the mathematics.
        param: this rank's part of the parameter; the parameter itself if it is not sharded.
        group: the parameter's group, with its options.
        state: this rank's part; empty before the first step.
        view: what ``plan.view`` says of the parameter's shape; of this rank's part of it.
        whole: the parameter as its group holds it.
        part: this rank's part of the gradient; None: the gradient is ``param.grad``.
        sums: complete statistics of g^2 of this step, as the second moment's format laid them out (reference only).
        zero: whether the gradient is all zeros on every rank, where that was asked.
    """

    name: str
    param: Tensor
    group: Mapping[str, Any]
    state: State
    plan: ParamPlan
    view: Geometry
    whole: Tensor
    part: Tensor | None = None
    sums: tuple[Tensor, ...] = ()
    zero: bool | None = None

    @property
    def grad(self) -> Tensor:
        return cast(Tensor, self.param.grad) if self.part is None else self.part

    @property
    def steps(self) -> int:
        """Steps that this parameter has taken."""
        return int(self.state["step"]) if self.state else 0
