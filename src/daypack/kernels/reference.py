"""The torch reference: what every fused kernel must equal. Works on any device, dtype, shape, stride and format.

It touches one chunk of a parameter at a time, so a step's temporary memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm, prod
from typing import cast

import torch
from torch import Tensor

from daypack.formats.base import Chunk, accumulator, chunks, geometry, read, write_
from daypack.projection import Projection, stepped
from daypack.update import Elements, Hyper, Norms, Update


def _gradient(update: Update, chunk: Chunk, hyper: Hyper) -> Tensor:
    """A gradient chunk to read only, in the accumulator's dtype: it may be the gradient itself."""
    g = read(update.grad, update.view, chunk).to(accumulator(update.param.dtype))
    return hyper.seen(g, _param(update, chunk) if hyper.coupled else g)


def _param(update: Update, chunk: Chunk) -> Tensor:
    """A chunk of the parameter to read only."""
    return read(update.param, update.view, chunk).to(accumulator(update.param.dtype))


def _chunks(update: Update) -> Iterator[Chunk]:
    return chunks(update.view, lcm(*(form.align(update.view) for _, form in update.plan.moments)))


def _hyper(update: Update, step: int) -> Hyper:
    return update.plan.rule.at(update.group, step)


def is_zero(update: Update) -> bool:
    """Whether every element of the gradient is zero, here or, where the ranks have told each other, on all of them."""
    if update.zero is not None:
        return update.zero
    view = geometry(tuple(update.grad.shape))
    # Chunk by chunk, because any() of the whole would allocate a byte for each of its elements.
    return not any(bool(read(update.grad, view, chunk).any()) for chunk in chunks(view))


def observe(update: Update) -> Tensor:
    """First pass: fill ``update.sums`` with the statistics of g^2; write nothing else.

    Returns:
        The sum of g^2, 0-dim. It is not finite if the gradient is not, or if a statistic of g^2 would overflow.
    """
    if update.plan.projection:
        # The projected gradient is no longer than the gradient. Its own statistics are taken when it is stepped.
        return update.plan.projection.squared(update.grad)
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
    if update.plan.projection:
        return  # its stand-in does both
    update.state["step"] += 1
    form = update.plan.exp_avg_sq
    if form and form.statistics:
        form.combine(update.state, "exp_avg_sq", update.view, update.sums, _hyper(update, update.steps).beta2)


def apply(update: Update, squares: Tensor | None = None) -> None:
    """Second pass: moments, the rule, decoupled decay and one rounding of the parameter.

    Args:
        squares: of the whole tensor, from `measure`, where the plan `measures`.
    """
    plan, state, view = update.plan, update.state, update.view
    if plan.projection:
        _apply_projected(update, plan.projection)
        return
    hyper = _hyper(update, update.steps)
    m_form, v_form = plan.exp_avg, plan.exp_avg_sq
    elements = _reader(update, hyper)
    norms = None
    if squares is not None:
        param, measured = squares.sqrt().tolist()
        norms = Norms(param, measured, prod(view.whole))
    for chunk in _chunks(update):
        x = elements(chunk)
        direction, m = plan.rule.direction(x, hyper, norms)
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


def measure(update: Update) -> Tensor:
    """Squares of the parameter and of what the rule measures, added up here: fp64 ``[2]``. A pass of its own."""
    measured, hyper = update.plan.rule.measured, _hyper(update, update.steps)
    squares = torch.zeros(2, dtype=torch.float64, device=update.param.device)
    elements = _reader(update, hyper)
    for chunk in _chunks(update):
        x = elements(chunk)
        squares[0] += x.p.square().sum(dtype=torch.float64)
        if measured is not None:
            squares[1] += measured(x, hyper).square().sum(dtype=torch.float64)
    return squares


def refresh(update: Update) -> None:
    """Take a new basis from the gradient if the old one has served its time and the gradient is not all zeros."""
    projection = update.plan.projection
    if projection and update.state["basis_left"] == 0 and not is_zero(update):
        projection.refresh_(update)


def _apply_projected(update: Update, projection: Projection) -> None:
    """Step a low-rank stand-in of the parameter, and bring where it went back to the parameter."""
    # An all-zero gradient has no directions to offer, and does not use the basis up.
    served = not is_zero(update)
    low = stepped(update) if served else projection.stand_in(update)
    observe(low)
    combine(low)
    apply(low, measure(low) if low.plan.measures else None)
    projection.write_back_(update, low.param)
    if served:
        update.state["basis_left"].sub_(1).clamp_(min=0)
