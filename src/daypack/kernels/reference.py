"""The torch reference: what every backend must equal. Works on any device, dtype, shape, stride, rule and format.

It touches one chunk of a parameter at a time, so a step's temporary memory does not grow with the model. Only rules
that need whole matrices (`daypack.rules.base.Rule.whole`) hold one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm, prod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack import sharding
from daypack.calibration import tools
from daypack.geometry import Chunk, accumulator, chunks, read, write_
from daypack.kernels.backend import Mask
from daypack.kernels.layouts import Layouts
from daypack.param import ParamStep
from daypack.projection import refresh_, stand_in, stepped, write_back_
from daypack.rules.base import Elements, Hyper, Moment, Norms


def _gradient(item: ParamStep, chunk: Chunk, hyper: Hyper) -> Tensor:
    """Return a gradient chunk in the accumulator's dtype. Do not write to it: it may be the gradient itself."""
    g = read(item.grad, item.view, chunk).to(accumulator(item.param.dtype))
    return hyper.seen(g, _param(item, chunk) if hyper.coupled else g)


def _param(item: ParamStep, chunk: Chunk) -> Tensor:
    """Return a chunk of the parameter in the accumulator's dtype. Do not write to it."""
    return read(item.param, item.view, chunk).to(accumulator(item.param.dtype))


def _chunks(item: ParamStep) -> Iterator[Chunk]:
    return chunks(item.view, lcm(*(form.align(item.view) for _, form in item.plan.stored)))


def observe(item: ParamStep) -> Tensor:
    """Take the first pass: fill ``item.sums`` with the statistics of the gradient, and write nothing else.

    Returns:
        The sum of g^2, 0-dim. It is not finite if the gradient is not, or if a statistic of g^2 would overflow.
    """
    if item.plan.projection:
        # The projected gradient is no longer than the gradient. Its own statistics are taken when it is stepped.
        return item.plan.projection.squared(item.grad)
    view, hyper = item.view, item.hyper(item.steps + 1)
    total = torch.zeros((), dtype=accumulator(item.param.dtype), device=item.param.device)
    item.sums = {m.name: form.sums(item.state, m.name, view, like=total) for m, form in item.plan.statistics}
    seen = [(moment, form) for moment, form in item.plan.statistics if moment.observed is not None]
    elements = _reader(item, hyper, observing=True) if seen else None
    for chunk in _chunks(item):
        squared = _gradient(item, chunk, hyper).square()
        for moment, form in item.plan.statistics:
            if moment.observed is None:
                form.observe(item.sums[moment.name], view, chunk, squared)
        if elements is not None:
            x = elements(chunk)
            for moment, form in seen:
                assert moment.observed is not None
                form.observe(item.sums[moment.name], view, chunk, moment.observed(x))
        total += squared.sum()
    return total


def combine(item: ParamStep) -> None:
    """Count the step between the passes, and update the statistics that the direction needs in their new form."""
    if item.plan.projection:
        return  # its stand-in does both
    item.state["step"] += 1
    _combine(item, late=False)


def _combine(item: ParamStep, late: bool) -> None:
    for moment, form in item.plan.statistics:
        if moment.late == late:
            form.combine(item.state, moment.name, item.view, item.sums[moment.name], _decay(moment, item))


def _decay(moment: Moment, item: ParamStep) -> float:
    assert moment.decay is not None  # the planner of an optimizer stores only averages as statistics
    return moment.decay(item.hyper(item.steps))


def apply(item: ParamStep, squares: Tensor | None = None) -> None:
    """Take the second pass: moments, the rule, decoupled decay and one rounding of the parameter.

    Args:
        squares: of the whole tensor, from `measure`, where the plan `measures`.
    """
    plan = item.plan
    if plan.projection:
        _apply_projected(item)
        return
    hyper, norms = item.hyper(item.steps), None
    if squares is not None:
        param, measured = squares.sqrt().tolist()
        norms = Norms(param, measured, prod(item.view.whole))
    elements = _reader(item, hyper, norms)
    if plan.rule.whole is None:
        for chunk in _chunks(item):
            x = elements(chunk)
            _write(item, chunk, x.p, plan.rule.direction(x), hyper)
            # The update reads fresh moments; the stored ones, rounded, only matter to the next step.
            _encode(item, chunk, x, hyper.step)
    else:
        _apply_whole(item, elements, hyper, plan.rule.whole)
    _combine(item, late=True)


def _write(item: ParamStep, chunk: Chunk, p: Tensor, direction: Tensor, hyper: Hyper) -> None:
    write_(item.param, item.view, chunk, (p * (1 - hyper.shrink)).sub_(direction, alpha=hyper.lr))


def _encode(item: ParamStep, chunk: Chunk, x: Elements, step: int) -> None:
    """Store the moments that are kept element by element."""
    for moment, form in item.plan.kept:
        if not form.statistics:
            form.encode_(item.state, moment.name, item.view, chunk, x.new(moment.name), step)


def _apply_whole(
    item: ParamStep, elements: Callable[[Chunk], Elements], hyper: Hyper, whole: Callable[[Tensor, Hyper], Tensor]
) -> None:
    """Take the second pass of a rule that needs whole matrices; each rank gathers the whole direction of a shard."""
    view, real = item.view, accumulator(item.param.dtype)
    direction = torch.zeros(view.view3, dtype=real, device=item.param.device)
    for chunk in _chunks(item):
        x = elements(chunk)
        direction[chunk] = item.plan.rule.direction(x)
        _encode(item, chunk, x, hyper.step)
    matrices = sharding.gather_rows(item.whole, direction, view)
    for matrix in matrices:
        matrix.copy_(whole(matrix, hyper))
    update = sharding.own_rows(matrices, view)
    for chunk in _chunks(item):
        _write(item, chunk, _param(item, chunk), update[chunk], hyper)


def _reader(
    item: ParamStep, hyper: Hyper, norms: Norms | None = None, observing: bool = False
) -> Callable[[Chunk], Elements]:
    """Return a function from a chunk to what the rule sees of it. Reading changes nothing: a chunk may be read twice.

    Args:
        observing: statistics are of the step before.
    """
    readers = [
        (moment.name, not form.statistics or moment.late or observing, form.decoder(item.state, moment.name, item.view))
        for moment, form in item.plan.kept
    ]

    def elements(chunk: Chunk) -> Elements:
        moments: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for name, old, decode in readers:
            moments[0 if old else 1][name] = decode(chunk)
        p, g = _param(item, chunk), _gradient(item, chunk, hyper)
        return Elements(item.plan.rule, hyper, p, g, *moments, norms)

    return elements


def measure(item: ParamStep) -> Tensor:
    """Return the squares of the parameter and of what the rule measures, summed over this rank's part: fp64 ``[2]``."""
    measured, hyper = item.plan.rule.measured, item.hyper(item.steps)
    squares = torch.zeros(2, dtype=torch.float64, device=item.param.device)
    elements = _reader(item, hyper)
    for chunk in _chunks(item):
        x = elements(chunk)
        squares[0] += x.p.square().sum(dtype=torch.float64)
        if measured is not None:
            squares[1] += measured(x).square().sum(dtype=torch.float64)
    return squares


def refresh_basis(item: ParamStep) -> None:
    """Take a new basis from the gradient if the old one is used up and the gradient is not all zeros."""
    if item.plan.projection and item.state["basis_left"] == 0 and not item.is_zero():
        refresh_(item)


def _apply_projected(item: ParamStep) -> None:
    """Step the low-rank stand-in of a parameter, and apply its change to the parameter."""
    # An all-zero gradient has no directions, and does not count against the life of the basis.
    served = not item.is_zero()
    low = stepped(item) if served else stand_in(item)
    observe(low)
    combine(low)
    apply(low, measure(low) if low.plan.measures else None)
    write_back_(item, low)
    if served:
        item.state["basis_left"].sub_(1).clamp_(min=0)


def note_zeros(items: list[ParamStep], totals: NDArray[np.float64]) -> None:
    """Note which gradients are known not to be zero: those whose sum of g^2 is above 0. A sum of 0 says nothing,
    because small squares underflow.
    """
    for item, total in zip(items, totals.tolist(), strict=True):
        item.zero = False if total > 0 else None


class Batch:
    """See `daypack.kernels.backend.Batch`. One parameter after the other; numbers come from each device at once."""

    def __init__(self, items: list[ParamStep]) -> None:
        self.items = items
        self.attach()
        # Local parts of sharded parameters may be new tensors at every step; a batch of them is not refreshed.
        self._layouts = Layouts(() if any(item.part is not None for item in items) else self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [tensor for item in self.items for tensor in (item.param, item.grad)]

    def refresh(self) -> bool:
        if any(item.param.grad is None for item in self.items):
            return False
        return self._layouts.hold(self._tensors()) and self._states() == self._known

    def _states(self) -> list[int]:
        return [id(value) for item in self.items for value in item.state.values()]

    def attach(self) -> None:
        self._known = self._states()

    def observe(self) -> NDArray[np.float64]:
        return _numbers([observe(item) for item in self.items])

    def shared_sums(self) -> list[list[Tensor]]:
        return [
            [form.shared_sums(item.sums[moment.name]).view(-1) for moment, form in item.plan.statistics
             if form.shared(item.view)]
            for item in self.items
        ]  # fmt: skip

    def check(self, active: Mask) -> None:
        pass  # what is loaded was checked, and nothing here depends on more

    def measure(self, active: Mask) -> dict[int, Tensor]:
        chosen = np.flatnonzero(active).tolist()
        for i in chosen:
            combine(self.items[i])
        return {i: measure(self.items[i]) for i in chosen if self.items[i].plan.measures}

    def apply(self, active: Mask, squares: dict[int, Tensor], last: bool) -> None:
        for i in np.flatnonzero(active).tolist():
            apply(self.items[i], squares.get(i))

    def step(self) -> Mask:
        totals = self.observe()
        note_zeros(self.items, totals)
        finite: Mask = np.isfinite(totals)
        for item in (self.items[i] for i in np.flatnonzero(finite)):
            combine(item)
            apply(item, measure(item) if item.plan.measures else None)
        return finite


def _numbers(totals: list[Tensor]) -> NDArray[np.float64]:
    """Return the value of each 0-dim tensor, with one transfer from each device."""
    result = np.zeros(len(totals))
    for device in {total.device for total in totals}:
        here = [i for i, total in enumerate(totals) if total.device == device]
        result[here] = torch.stack([totals[i].to(torch.float64) for i in here]).tolist()
    return result


class Reference:
    """The backend that takes everything."""

    name: ClassVar[str] = "reference"
    fused: ClassVar[bool] = False

    def about(self) -> str | None:
        return "torch"

    def refusal(self, item: ParamStep) -> str | None:
        return None

    def batch(self, items: list[ParamStep]) -> Batch:
        return Batch(items)

    def tools(self, grad: Tensor) -> tools.Tools | None:
        return tools.REFERENCE
