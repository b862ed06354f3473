"""An optimizer inside another: GaLore uses it for its stand-ins, Muon for everything but hidden matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.optim import Optimizer

from daypack.formats.dense import Dense
from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import Group
from daypack.param import ParamPlan
from daypack.rules.adamw import ADAMW
from daypack.rules.base import Rule


def inner_names(unfit: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the optimizers that can be used inside another: AdamW and ours, except those in ``unfit``."""
    from daypack.optim.registry import REGISTRY

    ours = (name for name, cls in REGISTRY.items() if issubclass(cls, CompressedOptimizer) and name not in unfit)
    return "adamw", *ours


@dataclass(frozen=True)
class Inner:
    """The inner optimizer of a group.

    Attributes:
        name: of its class in the registry.
        options: those that only it has, sorted.
        shared: names of the outer optimizer's options that it takes over where it has them.
        neutral: options of its own that are set to something else than its defaults.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    shared: tuple[str, ...]
    neutral: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls,
        group: Group,
        option: str,
        shared: tuple[str, ...],
        neutral: tuple[tuple[str, Any], ...] = (),
        where: str = "a parameter group",
    ) -> Inner:
        """Return the inner optimizer that ``option`` and ``<option>_options`` of ``group`` name, checked.

        Raises:
            ValueError: it does not take its options.
        """
        name, options = group[option], group[f"{option}_options"]
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise ValueError(f"{option}_options of {where} must be a dict or None, got {options!r}")
        inner = cls(name, tuple(sorted(options.items())), shared, neutral)
        try:
            inner.defaults()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{option}_options of {where} do not fit {name!r}: {error}") from error
        for key in options:
            if key in group and inner.shares(key):
                raise ValueError(f"{option}_options of {where} must not hold {key!r}, which its outer optimizer takes")
        return inner

    def defaults(self) -> dict[str, Any]:
        """Return its options where the outer optimizer says nothing."""
        defaults = optimizer_of(self).defaults
        neutral = {option: value for option, value in self.neutral if option in defaults}
        return {**defaults, **neutral, **dict(self.options)}

    def shares(self, option: str) -> bool:
        """Return whether it takes over ``option`` of the outer optimizer: it must have it too, and as a number if the
        outer one has a number.
        """
        defaults = optimizer_of(self).defaults
        return option in self.shared and option in defaults and not (option == "eps" and _is_pair(defaults["eps"]))

    def group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of ``group`` as the inner optimizer reads them."""
        taken = {option: group[option] for option in self.shared if self.shares(option)}
        return {**group, **self.defaults(), **taken}

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str, flat: bool = False) -> ParamPlan:
        """Return its plan for a parameter, with a rule that reads its options from the outer optimizer's group.

        Args:
            flat: the parameter is a flat piece of many.
        """
        optimizer = optimizer_of(self)
        if isinstance(optimizer, CompressedOptimizer):
            planned = optimizer.plan_partition if flat else optimizer.plan
            plan = planned(shape, dtype, self.group(group), name)
        else:
            plan = ParamPlan(ADAMW, (Dense(), Dense()))
        return replace(plan, rule=_translated(plan.rule, self))


@lru_cache(maxsize=256)
def optimizer_of(inner: Inner) -> Optimizer:
    """Build an optimizer over no parameters, which checks the options and knows the defaults and the plans."""
    from daypack.optim.registry import create

    return create(inner.name, [torch.empty(0, device="cpu")], **dict(inner.options))


@lru_cache(maxsize=256)
def _translated(rule: Rule, inner: Inner) -> Rule:
    """Return ``rule`` so that it reads its options from a group of the outer optimizer."""
    return replace(rule, translate=inner.group)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple)
