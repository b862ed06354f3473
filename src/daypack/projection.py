"""Stepping a matrix through a low-rank stand-in (GaLore): what happens before and after the rule's own step."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from daypack.geometry import accumulator
from daypack.param import ParamStep


def stepped(item: ParamStep) -> ParamStep:
    """Return what the rule steps: ``item`` itself, or its stand-in, after taking a new basis if one is due."""
    if item.plan.projection is None:
        return item
    refresh_(item)
    return stand_in(item)


def refresh_(item: ParamStep) -> None:
    """Take a new basis from the gradient (finite, not all zero) if the old one is used up."""
    basis, left = item.state["basis"], item.state["basis_left"]
    if item.plan.projection is None or left > 0:
        return
    try:
        basis.copy_(item.plan.projection.leading(item.grad))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        warnings.warn(
            f"the basis of parameter {item.name} stays as it is: its gradient could not be decomposed ({error})",
            stacklevel=2,
        )
        if not basis.any():
            return
    left.fill_(int(item.group["update_proj_gap"]))


def stand_in(item: ParamStep) -> ParamStep:
    """Return the low-rank parameter of zeros that is stepped in place of ``item``'s, with its gradient; it does not
    decay.
    """
    projection, real = item.plan.projection, accumulator(item.param.dtype)
    assert projection is not None
    param = torch.zeros(projection.low, dtype=real, device=item.param.device)
    param.grad = projection.down(item.grad, item.state["basis"].to(param.device), real)
    group = {**item.group, "weight_decay": 0.0}
    return replace(item, param=param, group=group, plan=replace(item.plan, projection=None), sums={})


def write_back_(item: ParamStep, low: ParamStep) -> None:
    """Apply the change of the stand-in to the parameter: ``p <- p (1 - lr wd) + scale q Q^T``."""
    assert item.plan.projection is not None
    kept = 1 - float(item.group["lr"]) * float(item.group["weight_decay"])
    scale = float(item.group["scale"])
    item.plan.projection.up_(item.param, low.param, item.state["basis"], kept, scale)
