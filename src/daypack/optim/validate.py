"""Checks of state against the plan of its parameter: every message about faulty state is made here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from daypack.formats.base import ComponentSpec, StateFormat
from daypack.geometry import Geometry
from daypack.param import ParamPlan
from daypack.rules.base import Moment

#: A dim of a live tensor that data has decided.
ANY = -1
#: What a moment may be kept in as it is.
_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def misfits(specs: Mapping[str, ComponentSpec], state: Mapping[str, Any], strict: bool = True) -> list[str]:
    """List what ``state`` lacks or has in another form than ``specs`` say, tensors of a wrong form first.

    Args:
        strict: tensors must be there, in the very dtype; else they may be missing, or in another floating-point dtype.
    """
    wrong = [
        f"{key} is {shown(state[key])}, not {brief(spec.dtype, spec.shape)}"
        for key, spec in specs.items()
        if key in state and not _fits(state[key], spec, strict) and (strict or state[key] is not None)
    ]
    return wrong + [f"{key} is missing" for key in specs if key not in state] if strict else wrong


def unknown(specs: Mapping[str, ComponentSpec], state: Mapping[str, Any]) -> list[str]:
    """List what ``state`` holds besides ``specs`` and the step."""
    return [f"{key} is not known" for key in state if key not in specs and key != "step"]


def damage(
    kept: Iterable[tuple[Moment | None, str, StateFormat]], state: Mapping[str, Any], view: Geometry
) -> list[str]:
    """List what is wrong with the values of state whose keys, shapes and dtypes fit.

    Args:
        kept: moment, key and format of each part; the moment is None for the basis of a projection.
    """
    found = (form.fault(dict(state), key, view, moment is not None and moment.squares) for moment, key, form in kept)
    return [text for text in found if text]


def parts_of(plan: ParamPlan) -> list[tuple[Moment | None, str, StateFormat]]:
    """Return the parts of a daypack plan as `damage` takes them."""
    moments = {moment.name: moment for moment, _ in plan.kept}
    return [(moments.get(key), key, form) for key, form in plan.stored]


def live_specs(plan: ParamPlan, view: Geometry, dtype: torch.dtype) -> dict[str, ComponentSpec]:
    """Return the tensors of live state for the part of a parameter that ``view`` describes."""
    found = {}
    for name, form in plan.stored:
        for live, saved in zip(form.components(view, dtype), form.saved(view, dtype), strict=True):
            # Where live and saved shapes differ, the live one depends on data in its last dim.
            shape = live.shape if live == saved else (*live.shape[:-1], ANY)
            found[name + live.suffix] = ComponentSpec(live.suffix, shape, live.dtype, live.follows)
    return found


def is_count(value: Any) -> bool:
    """Return whether ``value`` is a whole number from 0, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and is_count(value.item())
    return isinstance(value, (int, float)) and value >= 0 and float(value).is_integer()


def shown(value: Any) -> str:
    """Describe a value of the state in a few words."""
    if isinstance(value, Tensor):
        return shown(value.item()) if not value.dim() else brief(value.dtype, value.shape)
    return f"{value:g}" if isinstance(value, float) else str(value)


def brief(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Describe a dtype and a shape in a few words."""
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}".replace(f"{ANY}", "any")


def _fits(value: Any, spec: ComponentSpec, strict: bool) -> bool:
    if not isinstance(value, Tensor) or value.dim() != len(spec.shape):
        return False
    if any(wanted not in (ANY, size) for size, wanted in zip(value.shape, spec.shape, strict=True)):
        return False
    return value.dtype == spec.dtype if strict else value.dtype in _REAL
