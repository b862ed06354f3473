"""A sample of parameters and of their stored moments, taken before a step and compared after it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack import sharding
from daypack.formats.base import State, StateFormat
from daypack.geometry import Chunk, Geometry, accumulator, read
from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import Group, param_name
from daypack.optim.size import value_bytes
from daypack.optim.state_dict import part_of
from daypack.param import ParamPlan
from daypack.rules.base import Elements, Moment

#: Elements of each parameter whose movement is measured.
MOVED = 1024
#: Elements of each coded moment that are decoded, about.
DECODED = 4096
#: A moment is decoded over runs of columns of at least this many elements, if its blocks are not longer.
RUN_COLUMNS = 256


@dataclass(frozen=True)
class _Before:
    """A moment of one parameter before the step: what is needed to know it exactly after the step."""

    steps: int
    stored: Tensor
    param: Tensor


class Sample:
    """Numbers of one step of any torch optimizer, of what this process holds: no other rank is asked.

    Args:
        optimizer: about to step.
        generator: chooses the elements; another one or another state of it chooses others.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer, generator: torch.Generator) -> None:
        # One element of each of so many equal parts: a plain random sample has a larger error.
        self._places = (torch.arange(MOVED) + torch.rand(MOVED, generator=generator, dtype=torch.float64)) / MOVED
        self._corner: list[float] = torch.rand(3, generator=generator).tolist()
        self._before = {p: self._elements(p) for group in optimizer.param_groups for p in group["params"]}
        self._moments: dict[tuple[Tensor, str], _Before] = {}
        for p, _, plan, state, view in _ours(optimizer):
            for moment, form in plan.kept:
                if _is_followed(plan, moment) and form.codes(state, moment.name, view) is not None:
                    chunk = self._chunk(view, form)
                    stored = form.decode(state, moment.name, view, chunk)
                    param = read(sharding.to_local(p), view, chunk).to(stored.dtype, copy=True)
                    self._moments[p, moment.name] = _Before(int(state["step"]), stored, param)

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> dict[str, float]:
        """Return the numbers, after the step, by tag (docs/monitor.md). What cannot be measured is absent."""
        return {**_state_bytes(optimizer), **self._movement(optimizer), **self._codes(optimizer)}

    def _elements(self, p: Tensor) -> Tensor:
        """Copy some elements of a parameter, or all of them if it has few."""
        local = sharding.to_local(p.detach())
        size = local.numel()
        if size > len(self._places):
            local = local.take((self._places * size).long().clamp_(max=size - 1).to(local.device))
        values = torch.view_as_real(local) if local.is_complex() else local
        return values.to(accumulator(values.dtype), copy=True)

    def _movement(self, optimizer: Optimizer) -> dict[str, float]:
        """Return the RMS of what the step added to the parameters with a gradient, and how many are not finite."""
        squares: dict[str, float] = defaultdict(float)
        elements: dict[str, int] = defaultdict(int)
        broken = 0
        for g, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                before = self._before.get(p)
                if p.grad is None or before is None or not before.numel():
                    continue
                now = self._elements(p)
                broken += not bool(now.isfinite().all())
                moved = (now - before).square()
                mean = float(torch.where(moved.isfinite(), moved, 0).mean(dtype=torch.float64))
                for name in ("update_rms", f"update_rms/group_{g}"):
                    squares[name] += mean * sharding.to_local(p).numel()
                    elements[name] += sharding.to_local(p).numel()
        rms = {name: math.sqrt(squares[name] / elements[name]) for name in squares}
        return {**rms, "nonfinite": float(broken)} if rms else {}

    def _codes(self, optimizer: Optimizer) -> dict[str, float]:
        """Return shares of extreme and of zero codes, and the radial bias of the first moment, for the parameters
        stepped.
        """
        totals: dict[str, float] = defaultdict(float)
        weights: dict[str, float] = defaultdict(float)
        for p, group, plan, state, view in _ours(optimizer):
            for moment, form in plan.kept:
                name = moment.name
                codes = form.codes(state, name, view)
                if codes is None:
                    continue
                chunk = self._chunk(view, form)
                stored = form.decode(state, name, view, chunk)
                extreme = codes.is_end().to(stored.device)[codes.read(chunk)[0].int()]
                weight = float(view.matrices * view.rows * view.cols)
                for key, flags in ((f"{name}/saturated", extreme), (f"{name}/zero", stored == 0)):
                    totals[key] += weight * float(flags.float().mean())
                    weights[key] += weight
                before = self._moments.get((p, name))
                if before is None or int(state["step"]) == before.steps or not _lies_alike(p):
                    continue
                exact = _unrounded(p, group, plan, name, view, chunk, before, int(state["step"]))
                each = weight / exact.numel()
                totals[f"{name}/radial_bias"] += each * float(((stored - exact) * exact).sum(dtype=torch.float64))
                weights[f"{name}/radial_bias"] += each * float(exact.square().sum(dtype=torch.float64))
        return {name: totals[name] / weights[name] for name in totals if weights[name]}

    def _chunk(self, view: Geometry, form: StateFormat) -> Chunk:
        """Return evenly spaced rows of one matrix, all over the same run of columns, which begins with a block."""
        (matrices, rows, cols), align = view.view3, form.align(view)
        of_matrix, of_row, of_col = self._corner
        start = int(of_col * math.ceil(cols / align)) * align
        stop = min(start + max(RUN_COLUMNS // align * align, align), cols)
        step = max(1, math.ceil(rows * (stop - start) / DECODED))
        first = int(of_row * min(step, rows))
        matrix = int(of_matrix * matrices)
        return slice(matrix, matrix + 1), slice(first, rows, step), slice(start, stop)


def _ours(optimizer: Optimizer) -> Iterator[tuple[Tensor, Group, ParamPlan, State, Geometry]]:
    """Yield the parameters that one of daypack's optimizers has stepped, with this process's part of their state."""
    if not isinstance(optimizer, CompressedOptimizer):
        return
    optimizer.wait()
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            state = optimizer.state.get(p)
            if state and int(state["step"]) and sharding.to_local(p).numel():
                plan = optimizer.plan_of(p, group, param_name(group, g, i))
                yield p, group, plan, part_of(p, plan, state), sharding.local_view(p, plan)


def _lies_alike(p: Tensor) -> bool:
    """Return whether this process has the gradient for its part of the parameter, without communication."""
    return p.grad is not None and getattr(p.grad, "placements", None) == getattr(p, "placements", None)


def _is_followed(plan: ParamPlan, moment: Moment) -> bool:
    """Return whether a moment after a step can be computed from a sample of it and of the gradient."""
    return moment.alone and not moment.squares and plan.projection is None


def _unrounded(
    p: Tensor, group: Group, plan: ParamPlan, name: str, view: Geometry, chunk: Chunk, before: _Before, steps: int
) -> Tensor:
    """Return a moment before it was rounded: what the rule makes of the stored value and the gradient."""
    hyper = plan.rule.at(group, steps)
    grad = read(sharding.to_local(cast(Tensor, p.grad)), view, chunk).to(before.stored.dtype)
    seen = hyper.seen(grad, before.param)
    return Elements(plan.rule, hyper, before.param, seen, {name: before.stored}).new(name)


def _state_bytes(optimizer: Optimizer) -> dict[str, float]:
    """Return the bytes of state, in all and by format."""
    totals: dict[str, float] = defaultdict(float)
    seen: set[int] = set()
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            formats = _formats(optimizer, p, group, param_name(group, g, i)) if state else {}
            for key, value in state.items():
                kind = formats.get(key, "counter" if key == "step" else "dense")
                totals[f"state_bytes/{kind}"] += value_bytes(value, seen)
    return {"state_bytes": float(sum(totals.values())), **totals}


def _formats(optimizer: Optimizer, p: Tensor, group: Group, name: str) -> dict[Any, str]:
    """Map each state key to the format that it belongs to, in daypack's optimizers."""
    if not isinstance(optimizer, CompressedOptimizer):
        return {}
    plan = optimizer.plan_of(p, group, name)
    view = plan.view(p.shape)
    return {
        moment + spec.suffix: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(form).__name__).lower()
        for moment, form in plan.stored
        for spec in form.components(view, p.dtype)
    }
