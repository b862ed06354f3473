"""What is decided once about a parameter (`ParamPlan`), what one step needs to know (`Hyper`), and the unit of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch import Tensor

if TYPE_CHECKING:
    from daypack.formats.base import Geometry, State, StateFormat


#: (first moment, second moment, hyper-parameters) -> direction, all of one shape and dtype.
Rule: TypeAlias = "Callable[[Tensor, Tensor, Hyper], Tensor]"


@dataclass(frozen=True)
class ParamPlan:
    """How one parameter is stepped and how its moments are stored. Equal plans share a kernel.

    Attributes:
        rule: a function of `daypack.rules`.
        exp_avg: format of the first moment.
        exp_avg_sq: format of the second moment.
    """

    rule: Rule
    exp_avg: StateFormat
    exp_avg_sq: StateFormat

    @property
    def moments(self) -> tuple[tuple[str, StateFormat], ...]:
        """State name and format of each moment."""
        return ("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of one step, read from the group at that step.

    Attributes:
        step: the step being taken, from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    step: int

    @classmethod
    def of(cls, group: Mapping[str, Any], step: int) -> Hyper:
        beta1, beta2 = group["betas"]
        return cls(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=group["maximize"],
            step=step,
        )

    @property
    def bias_correction1(self) -> float:
        return 1 - self.beta1**self.step

    @property
    def bias_correction2(self) -> float:
        return 1 - self.beta2**self.step


@dataclass
class Update:
    """One parameter on its way through a step. Kept from step to step, so what may change is read where it stands.

    Attributes:
        name: for messages only; it never enters the mathematics.
        group: the parameter's group, with its options.
        state: empty before the first step.
        sums: complete statistics of g^2 of this step, as the second moment's format laid them out (reference only).
    """

    name: str
    param: Tensor
    group: Mapping[str, Any]
    state: State
    plan: ParamPlan
    view: Geometry
    sums: tuple[Tensor, ...] = ()

    @property
    def grad(self) -> Tensor:
        return cast(Tensor, self.param.grad)

    @property
    def steps(self) -> int:
        """Steps that this parameter has taken."""
        return int(self.state["step"]) if self.state else 0
