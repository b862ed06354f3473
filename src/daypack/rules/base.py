"""What an update rule is: the moments that it remembers, how each advances, and the direction that it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Options: TypeAlias = Mapping[str, Any]


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
    options: Options | None = None

    @property
    def bias_correction1(self) -> float:
        return 1 - self.beta1**self.step

    @property
    def bias_correction2(self) -> float:
        return 1 - self.beta2**self.step

    def seen(self, g: Tensor, p: Tensor) -> Tensor:
        """Return the gradient as the rule uses it: negated to maximize, with coupled decay. May be ``g`` itself."""
        g = -g if self.maximize else g
        return g.add(p, alpha=self.coupled) if self.coupled else g

    def option(self, name: str) -> Any:
        return (self.options or {})[name]


@dataclass(frozen=True)
class Norms:
    """Euclidean norms over a whole parameter of ``numel`` elements: its own, and that of what its rule measures."""

    param: float
    measured: float
    numel: int


class Elements:
    """What a rule sees of some elements of a parameter: tensors of one shape, fp32 (fp64 for fp64 parameters).

    Args:
        rule: whose moments they are.
        hyper: numbers of this step.
        p: the parameter before the step.
        g: its gradient, turned round if the rule ascends, with coupled weight decay.
        old: moments before this step, by name.
        new: moments after it, as far as they are known already: those that are kept as statistics.
        norms: for rules that measure.
    """

    def __init__(
        self,
        rule: Rule,
        hyper: Hyper,
        p: Tensor,
        g: Tensor,
        old: Mapping[str, Tensor],
        new: Mapping[str, Tensor] | None = None,
        norms: Norms | None = None,
    ) -> None:
        self.rule, self.hyper, self.p, self.g, self._old = rule, hyper, p, g, old
        self._new, self._norms = dict(new or {}), norms

    def keeps(self, name: str) -> bool:
        """Return whether the parameter's plan keeps this moment."""
        return name in self._old or name in self._new

    def old(self, name: str) -> Tensor:
        """Return a moment before this step. If it is kept as statistics, only a `Moment.late` one has an old value."""
        return self._old[name]

    def new(self, name: str) -> Tensor:
        """Return a moment after this step; it advances when it is first asked for."""
        if name not in self._new:
            self._new[name] = self.rule.moment(name).advance(self)
        return self._new[name]

    @property
    def norms(self) -> Norms:
        return cast(Norms, self._norms)


#: (options of the group, steps) -> factor from what is stored to the mean that it stands for.
Scale: TypeAlias = Callable[[Options, int], float]


def unbiased(options: Options, step: int) -> float:
    """Return the scale of an average that is not biased towards 0."""
    return 1.0


def bias_corrected(index: int) -> Scale:
    """Return the scale of a moving average from 0 with decay ``betas[index]``."""
    return lambda options, step: 1 / (1 - float(options["betas"][index]) ** step)


#: What most rules average: state without the name of a rule is taken for this.
PLAIN_MEANS = ("g", "g^2")


@dataclass(frozen=True)
class Meaning:
    """What a moment stands for. State is carried from rule to rule so that means of the same thing stay what they are.

    Attributes:
        of: what it is a mean of: ``"g"``, ``"g^2"``, or words of the rule's own.
        scale: see `Scale`.
    """

    of: str
    scale: Scale = unbiased


@dataclass(frozen=True)
class Moment:
    """One number that a rule remembers of each element, in some format.

    Attributes:
        name: the beginning of its keys in the state, torch's own name where torch has one.
        advance: returns the moment after the step, a new tensor, from ``x.old(name)``, ``x.g`` and other moments.
        meaning: what it stands for, for conversion.
        decay: for a moment that may be kept as statistics: it is a moving average, with this decay, of `observed`.
        observed: what the average is taken of; None: ``g^2``.
        late: the direction reads the moment from before the step: statistics are brought up to date after it.
        squares: a mean of squares: never negative, and what the direction is divided by the root of.
        title: words for it, for people.
        symbol: a few characters for it, for tables.
        alone: it advances from its own old value and the gradient only, so a sample of elements can be computed.
    """

    name: str
    advance: Callable[[Elements], Tensor]
    meaning: Meaning
    decay: Callable[[Hyper], float] | None = None
    observed: Callable[[Elements], Tensor] | None = None
    late: bool = False
    squares: bool = False
    title: str = "first moment"
    symbol: str = "m"
    alone: bool = True


def mean_of_gradients(
    name: str = "exp_avg", beta: Callable[[Hyper], float] = lambda hyper: hyper.beta1, scale: Scale | None = None
) -> Moment:
    """Return the moment ``m = b m + (1 - b) g``, from 0."""

    def advance(x: Elements) -> Tensor:
        return torch.lerp(x.old(name), x.g, 1 - beta(x.hyper))

    return Moment(name, advance, Meaning("g", scale or bias_corrected(0)))


def mean_of_squares(
    name: str = "exp_avg_sq",
    beta: Callable[[Hyper], float] = lambda hyper: hyper.beta2,
    scale: Scale | None = None,
    late: bool = False,
) -> Moment:
    """Return the moment ``v = b v + (1 - b) g^2``, from 0."""

    def advance(x: Elements) -> Tensor:
        decay = beta(x.hyper)
        return (x.old(name) * decay).addcmul_(x.g, x.g, value=1 - decay)

    return Moment(
        name, advance, Meaning("g^2", scale or bias_corrected(1)), beta, None, late, True, "second moment", "v"
    )


@dataclass(frozen=True)
class Rule:
    """An update rule: ``p <- p * (1 - shrink) - lr * direction``. Pure formulas, blind to how moments are stored.

    Attributes:
        name: for messages, and saved with each group.
        moments: in the order of their keys in the state. A plan may leave some of them out.
        direction: a new tensor, or one of the new moments.
        hyper: numbers of a step from the group's options and the step, from 1.
        options: names of the options that ``hyper`` and the formulas read.
        measured: for rules that scale a whole tensor: what the norm is taken of. It costs a pass of its own.
        whole: for rules that need whole matrices: makes the update ``[rows, cols]`` of the direction of all of it.
        steady: the gradient that leaves the moments as they are, for telling updates from stored moments; None: the
            first moment itself.
        translate: makes of a group the options that ``hyper`` reads, where the group is another optimizer's; None:
            those of the group itself.
    """

    name: str
    moments: tuple[Moment, ...]
    direction: Callable[[Elements], Tensor]
    hyper: Callable[[Options, int], Hyper]
    options: tuple[str, ...]
    measured: Callable[[Elements], Tensor] | None = None
    whole: Callable[[Tensor, Hyper], Tensor] | None = None
    steady: Callable[[Elements], Tensor] | None = None
    translate: Callable[[Options], Options] | None = None

    def moment(self, name: str) -> Moment:
        """Return the moment called ``name``.

        Raises:
            KeyError: the rule has none.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Moment]:
        return {moment.name: moment for moment in self.moments}

    def read(self, group: Options) -> Options:
        """Return the options of ``group`` as ``hyper`` reads them."""
        return self.translate(group) if self.translate else group

    def at(self, group: Options, step: int) -> Hyper:
        """Return the numbers of the ``step``-th step (from 1) of a parameter in ``group``."""
        return self.hyper(self.read(group), step)

    @property
    def plain(self) -> Rule:
        """The rule that reads its options from a group as it is; kernels know it."""
        return replace(self, translate=None) if self.translate else self


def decoupled(group: Options, step: int) -> Hyper:
    """Return AdamW's options; decay shrinks the parameter by ``lr * weight_decay``."""
    beta1, beta2 = map(float, group["betas"][:2])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    eps = float(group.get("eps", 0.0))
    return Hyper(step, lr, beta1, beta2, eps, decay, group["maximize"], shrink=lr * decay, options=group)


#: Options that `decoupled` reads.
ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
