"""What is learned from the first gradients that are not zero, such as codebooks, and blocks of the second moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from daypack import sharding
from daypack.calibration.tools import Tools
from daypack.formats.base import State, StateFormat
from daypack.kernels import dispatch
from daypack.param import ParamPlan, ParamStep
from daypack.projection import stepped

#: A moment that still lacks what its format learns.
Unlearned = tuple[ParamStep, str, StateFormat]


class Calibration:
    """Calibrates each parameter once. What is learned is kept in the state; this object only notes what was checked."""

    def __init__(self) -> None:
        self._done = WeakIdKeyDictionary()

    def is_done(self, item: ParamStep) -> bool:
        """Return whether the state of a parameter holds all that it learns."""
        return all(self._holds(form.learned(item.state, name)) for name, form in item.plan.stored)

    def run(self, items: Sequence[ParamStep], everyone: Iterable[tuple[ParamPlan, State]]) -> bool:
        """Learn what ``items`` still lack, from their gradients. Those whose gradient is all zeros wait for another.

        Args:
            everyone: plan and state of all parameters in group order; what the first of them has learned under the same
                lesson is taken over.

        Returns:
            Whether statistics must be taken once more, because what they are taken over has changed.
        """
        lessons: dict[str, list[Unlearned]] = {}
        alone: list[list[Unlearned]] = []
        for item in items:
            for name, form in item.plan.stored:
                if self._holds(form.learned(item.state, name)) or item.is_zero():
                    continue
                entry = item, name, form
                if form.lesson is None:
                    alone.append([entry])
                else:
                    lessons.setdefault(form.lesson, []).append(entry)
        states, again = list(everyone) if lessons else [], False
        for lesson, waiting in lessons.items():
            known = known_in(lesson, states)
            again |= _calibrate(waiting, _learn(waiting) if known is None else known)
        for waiting in alone:
            again |= _calibrate(waiting, _learn(waiting))
        return again

    def _holds(self, learned: Tensor | None) -> bool:
        """Return whether there is nothing to learn, or calibration has filled this tensor. Reads the device once per
        tensor.
        """
        if learned is None or learned in self._done:
            return True
        if learned.any():
            self._done[learned] = True
            return True
        return False


def known_in(lesson: str, states: Iterable[tuple[ParamPlan, State]]) -> Tensor | None:
    """Return what the first parameter that has learned ``lesson`` has learned; None if none has."""
    for plan, state in states:
        for name, form in plan.stored:
            learned = form.learned(state, name) if form.lesson == lesson and state else None
            if learned is not None and learned.any():
                return learned
    return None


def _learn(waiting: list[Unlearned]) -> Tensor:
    """Learn from the gradients of all entries of ``waiting`` on all ranks, with one collective per set of process
    groups.
    """
    members: dict[sharding.Groups, list[tuple[ParamStep, StateFormat]]] = {}
    for item, _, form in waiting:
        members.setdefault(sharding.groups_of(item.whole), []).append((stepped(item), form))
    total = None
    for groups, many in members.items():
        part = sum_of([form.gather(low.grad, low.view, _tools(low)) for low, form in many])
        part = sharding.add_up(groups, part.to(many[0][0].param.device)).cpu()
        total = part if total is None else total + part
    assert total is not None
    (low, form), *_ = next(iter(members.values()))
    return form.solve(total, low.view, _tools(low))


def sum_of(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of ``parts``, on the CPU if they are on several devices."""
    first, *rest = parts
    for part in rest:
        first = first + part if part.device == first.device else first.cpu() + part.cpu()
    return first


def _tools(item: ParamStep) -> Tools:
    return dispatch.tools(item.grad, item.group["fused"])


def _calibrate(waiting: list[Unlearned], found: Tensor) -> bool:
    again = [form.calibrate_(item.state, name, item.view, found) for item, name, form in waiting]
    return any(again)
