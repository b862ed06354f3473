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
Pupil = tuple[ParamStep, str, StateFormat]


class Calibration:
    """Calibrates each parameter once. What is learned stands in the state; here is only which state was looked at."""

    def __init__(self) -> None:
        self._done = WeakIdKeyDictionary()

    def is_done(self, item: ParamStep) -> bool:
        """Whether the state of a parameter holds all that it learns."""
        return all(self._holds(form.learned(item.state, name)) for name, form in item.plan.stored)

    def run(self, items: Sequence[ParamStep], everyone: Iterable[tuple[ParamPlan, State]]) -> bool:
        """Learn what ``items`` still lack, from their gradients. Those whose gradient is all zeros wait for another.

        Args:
            everyone: plan and state of all parameters in group order; what the first of them has learned under the same
                lesson is taken over.

        Returns:
            Whether statistics must be taken once more, because what they are taken over has changed.
        """
        lessons: dict[str, list[Pupil]] = {}
        alone: list[list[Pupil]] = []
        for item in items:
            for name, form in item.plan.stored:
                if self._holds(form.learned(item.state, name)) or item.is_zero():
                    continue
                pupil = item, name, form
                if form.lesson is None:
                    alone.append([pupil])
                else:
                    lessons.setdefault(form.lesson, []).append(pupil)
        states, again = list(everyone) if lessons else [], False
        for lesson, pupils in lessons.items():
            known = known_in(lesson, states)
            again |= _teach(pupils, _learn(pupils) if known is None else known)
        for pupils in alone:
            again |= _teach(pupils, _learn(pupils))
        return again

    def _holds(self, learned: Tensor | None) -> bool:
        """Whether there is nothing to learn, or calibration has filled this tensor. Asked of the device once."""
        if learned is None or learned in self._done:
            return True
        if learned.any():
            self._done[learned] = True
            return True
        return False


def known_in(lesson: str, states: Iterable[tuple[ParamPlan, State]]) -> Tensor | None:
    """What the first parameter that has learned ``lesson`` has learned; None if none has."""
    for plan, state in states:
        for name, form in plan.stored:
            learned = form.learned(state, name) if form.lesson == lesson and state else None
            if learned is not None and learned.any():
                return learned
    return None


def _learn(pupils: list[Pupil]) -> Tensor:
    """What follows from the gradients of all ``pupils``, on all ranks: one collective per set of process groups."""
    members: dict[sharding.Groups, list[tuple[ParamStep, StateFormat]]] = {}
    for item, _, form in pupils:
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
    """Their sum, on the CPU if they lie on several devices."""
    first, *rest = parts
    for part in rest:
        first = first + part if part.device == first.device else first.cpu() + part.cpu()
    return first


def _tools(item: ParamStep) -> Tools:
    return dispatch.tools(item.grad, item.group["fused"])


def _teach(pupils: list[Pupil], found: Tensor) -> bool:
    again = [form.calibrate_(item.state, name, item.view, found) for item, name, form in pupils]
    return any(again)
