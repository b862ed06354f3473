"""The torch reference: what every fused kernel must equal. Works on any device, dtype, shape, stride and format.

It touches one chunk of a parameter at a time, so a step's temporary memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm, prod
from typing import cast

import torch
from torch import Tensor

from daypack.formats.base import Chunk, accumulator, chunks, read, write_
from daypack.update import Elements, Hyper, Update


def _gradient(update: Update, chunk: Chunk, hyper: Hyper) -> Tensor:
    """A gradient chunk to read only, in the accumulator's dtype: it may be the gradient itself."""
    g = read(update.grad, update.view, chunk).to(accumulator(update.param.dtype))
    g = -g if hyper.maximize else g
    return g.add(_param(update, chunk), alpha=hyper.coupled) if hyper.coupled else g


def _param(update: Update, chunk: Chunk) -> Tensor:
    """A chunk of the parameter to read only."""
    return read(update.param, update.view, chunk).to(accumulator(update.param.dtype))


def _chunks(update: Update) -> Iterator[Chunk]:
    return chunks(update.view, lcm(*(form.align(update.view) for _, form in update.plan.moments)))


def _hyper(update: Update, step: int) -> Hyper:
    return update.plan.rule.hyper(update.group, step)


def is_zero(update: Update) -> bool:
    """Whether every element of the gradient is zero, here or, where the ranks have told each other, on all of them."""
    if update.zero is not None:
        return update.zero
    # Chunk by chunk, because any() of the whole would allocate a byte for each of its elements.
    return not any(bool(read(update.grad, update.view, chunk).any()) for chunk in chunks(update.view))


def observe(update: Update) -> Tensor:
    """First pass: fill ``update.sums`` with the statistics of g^2; write nothing else.

    Returns:
        The sum of g^2, 0-dim. It is not finite if the gradient is not, or if a statistic of g^2 would overflow.
    """
    form, hyper = update.plan.exp_avg_sq, _hyper(update, update.steps + 1)
    total = torch.zeros((), dtype=accumulator(update.param.dtype), device=update.param.device)
    update.sums = form.sums(update.state, "exp_avg_sq", update.view, like=total) if form else ()
    for chunk in _chunks(update):
        squared = _gradient(update, chunk, hyper).square()
        if form:
            form.observe(update.sums, update.view, chunk, squared)
        total += squared.sum()
    return total


def combine(update: Update) -> None:
    """Between the passes: count the step, and bring the second moment's statistics up to date."""
    update.state["step"] += 1
    form = update.plan.exp_avg_sq
    if form and form.statistics:
        form.combine(update.state, "exp_avg_sq", update.view, update.sums, _hyper(update, update.steps).beta2)


def apply(update: Update, factor: float = 1.0) -> None:
    """Second pass: moments, the rule, decoupled decay and one rounding of the parameter.

    Args:
        factor: the whole tensor's, from `measure`, where the rule has one.
    """
    plan, state, view = update.plan, update.state, update.view
    hyper = _hyper(update, update.steps)
    m_form, v_form = plan.exp_avg, plan.exp_avg_sq
    elements = _reader(update, hyper)
    for chunk in _chunks(update):
        x = elements(chunk)
        direction, m = plan.rule.direction(x, hyper, factor)
        write_(update.param, view, chunk, (x.p * (1 - hyper.shrink)).sub_(direction, alpha=hyper.lr))
        # The update reads fresh moments; the stored ones, rounded, only matter to the next step.
        if v_form and not v_form.statistics:
            v_form.encode_(state, "exp_avg_sq", view, chunk, cast(Tensor, x.v), hyper.step)
        if m_form:
            m_form.encode_(state, "exp_avg", view, chunk, cast(Tensor, m), hyper.step)


def _reader(update: Update, hyper: Hyper) -> Callable[[Chunk], Elements]:
    """What the rule sees of a chunk. Reading changes nothing, so a chunk may be read twice."""
    m_form, v_form, view = update.plan.exp_avg, update.plan.exp_avg_sq, update.view
    read_m = m_form.decoder(update.state, "exp_avg", view) if m_form else None
    read_v = v_form.decoder(update.state, "exp_avg_sq", view) if v_form else None

    def elements(chunk: Chunk) -> Elements:
        g = _gradient(update, chunk, hyper)
        v = read_v(chunk) if read_v else None
        if v is not None and v_form and not v_form.statistics:
            v = (v * hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
        return Elements(_param(update, chunk), g, read_m(chunk) if read_m else None, v)

    return elements


def measures(update: Update) -> bool:
    """Whether the rule scales whole tensors, so that `measure` has to come before `apply`."""
    return update.plan.rule.measured is not None


def measure(update: Update) -> Tensor:
    """Squares of the parameter and of what the rule measures, added up here: fp64 ``[2]``. A pass of its own."""
    rule, hyper = update.plan.rule, _hyper(update, update.steps)
    squares = torch.zeros(2, dtype=torch.float64, device=update.param.device)
    elements = _reader(update, hyper)
    for chunk in _chunks(update) if rule.measured else ():
        x = elements(chunk)
        for i, tensor in enumerate((x.p, rule.measured(x, hyper) if rule.measured else x.p)):
            squares[i] += tensor.square().sum(dtype=torch.float64)
    return squares


def factor_of(update: Update, squares: Tensor) -> float:
    """The factor of a whole tensor from the `measure` of all its parts."""
    rule, (param, measured) = update.plan.rule, squares.sqrt().tolist()
    return rule.factor(param, measured, prod(update.view.whole), _hyper(update, update.steps)) if rule.factor else 1.0
