"""The torch reference: what every fused kernel must equal. Works on any device, dtype, shape, stride and format.

It touches one chunk of a parameter at a time, so a step's temporary memory does not grow with the model.
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from daypack.formats.base import Chunk, accumulator, chunks, read, write_
from daypack.plan import Hyper, Update


def _gradient(update: Update, chunk: Chunk) -> Tensor:
    """A gradient chunk to read only, in the accumulator's dtype: it may be the gradient itself."""
    g = read(update.grad, update.view, chunk).to(accumulator(update.param.dtype))
    return -g if update.group["maximize"] else g


def _align(update: Update) -> int:
    return lcm(*(form.align(update.view) for _, form in update.plan.moments))


def is_zero(update: Update) -> bool:
    """Whether every element of the gradient is zero."""
    # Chunk by chunk, because any() of the whole would allocate a byte for each of its elements.
    return not any(bool(read(update.grad, update.view, chunk).any()) for chunk in chunks(update.view))


def observe(update: Update) -> Tensor:
    """First pass: fill ``update.sums`` with the statistics of g^2; write nothing else.

    Returns:
        The sum of g^2, 0-dim. It is not finite if the gradient is not, or if a statistic of g^2 would overflow.
    """
    form = update.plan.exp_avg_sq
    total = torch.zeros((), dtype=accumulator(update.param.dtype), device=update.param.device)
    update.sums = form.sums(update.state, "exp_avg_sq", update.view, like=total)
    for chunk in chunks(update.view, _align(update)):
        squared = _gradient(update, chunk).square()
        form.observe(update.sums, update.view, chunk, squared)
        total += squared.sum()
    return total


def apply(update: Update) -> None:
    """Second pass: the step count, both moments, the rule, decoupled decay and one rounding of the parameter."""
    plan, state, view = update.plan, update.state, update.view
    state["step"] += 1
    hyper = Hyper.of(update.group, update.steps)
    m_form, v_form = plan.exp_avg, plan.exp_avg_sq
    if v_form.statistics:
        v_form.combine(state, "exp_avg_sq", view, update.sums, hyper.beta2)
    read_m, read_v = (form.decoder(state, moment, view) for moment, form in plan.moments)
    for chunk in chunks(view, _align(update)):
        g = _gradient(update, chunk)
        # The update reads the fresh moment; the stored one, rounded, only matters to the next step.
        m = torch.lerp(read_m(chunk), g, 1 - hyper.beta1)
        v = read_v(chunk)
        if not v_form.statistics:
            v = (v * hyper.beta2).addcmul_(g, g, value=1 - hyper.beta2)
            v_form.encode_(state, "exp_avg_sq", view, chunk, v, hyper.step)
        p = read(update.param, view, chunk).to(g.dtype) * (1 - hyper.lr * hyper.weight_decay)
        write_(update.param, view, chunk, p.sub_(plan.rule(m, v, hyper), alpha=hyper.lr))
        m_form.encode_(state, "exp_avg", view, chunk, m, hyper.step)
