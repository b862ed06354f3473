"""Predict what any registered optimizer stores, without memory.

daypack's own optimizers say for each parameter which tensors they store (`ComponentSpec`), and allocate by the same
list. torch's own take one step on the meta device, and what they have stored then is looked at.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from daypack.formats.base import ComponentSpec
from daypack.geometry import CHUNK_ELEMENTS, accumulator
from daypack.optim.base import CompressedOptimizer
from daypack.optim.groups import param_groups
from daypack.optim.options import param_name
from daypack.optim.registry import REGISTRY, create
from daypack.optim.state_dict import STEP
from daypack.param import ParamPlan
from daypack.planner.live_tensors import LiveTensors
from daypack.planner.model import ParamSpec
from daypack.rules.base import PLAIN_MEANS

#: State of one parameter: state key -> stored tensor.
StoredTensors: TypeAlias = "dict[str, ComponentSpec]"

#: A step of daypack's holds less than this many fp32 buffers of one chunk (docs/memory.md: below 64 MiB).
STEP_BUFFERS = 32
#: One that projects gradients works on whole parameters: two fp32 copies, and while a basis is found three fp64
#: matrices of ``min(rows, cols)^2``; together at most this many fp32 copies of the parameter.
PROJECTION_COPIES = 8
#: One whose rule needs whole matrices holds a direction in fp32 and its own products: at most as many as this.
WHOLE_COPIES = 5


@dataclass(frozen=True)
class Predicted:
    """What one parameter keeps.

    Attributes:
        tensors: its state.
        dense: bytes of the moments of its rule in fp32 (fp64), at least of AdamW's two.
        adamw: whether it keeps AdamW's moments of every element, a mean of g and one of g^2, in whatever form.
    """

    tensors: StoredTensors
    dense: int
    adamw: bool


@dataclass(frozen=True)
class Prediction:
    """What an optimizer keeps and needs.

    Attributes:
        params: in the order they were asked about.
        temporaries: bytes that a step holds at its peak beyond parameters, gradients and state.
        notes: the optimizer's own warnings.
    """

    params: list[Predicted]
    temporaries: int
    notes: tuple[str, ...] = ()


def predict(
    name: str,
    params: Sequence[ParamSpec],
    options: Mapping[str, Any],
    *,
    module: nn.Module | None = None,
    foreach: bool = True,
    flat: bool = False,
) -> Prediction:
    """Find the state of each whole parameter, the temporary bytes of a step, and the optimizer's own warnings.

    Args:
        flat: the parameters are plain one-dimensional tensors, as ZeRO hands them over, and not `nn.Parameter`.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not is_ours(name):
            return _stepped(name, params, options, foreach)
        tensors_of = [_placeholder(p, flat) for p in params]
        groups = _groups(params, tensors_of)
        if module is not None and any(p.requires_grad for p in module.parameters()):
            known = param_groups(module)  # it may know the module; its parameters are exchanged for those planned for
            known[:] = groups
            groups = known
        optimizer = cast(CompressedOptimizer, _create(name, groups, options))
    found: dict[Tensor, Predicted] = {}
    caveats: dict[str, list[str]] = defaultdict(list)
    whole = 0
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            called = param_name(group, g, i)
            plan = optimizer.plan_of(p, group, called)
            tensors = {STEP.suffix: STEP, **plan.specs(p.shape, p.dtype)}
            found[p] = Predicted(tensors, _dense(p, len(plan.rule.moments)), _keeps_adamws(plan))
            copies = PROJECTION_COPIES if plan.projection else WHOLE_COPIES if plan.rule.whole else 0
            whole = max(whole, copies * 4 * p.numel())
            caveats[optimizer.caveat(p, group, called) or ""].append(called)
    said = [str(warning.message) for warning in caught]
    said += [f"{type(optimizer).__name__} {text}: {', '.join(names)}" for text, names in caveats.items() if text]
    notes = tuple(dict.fromkeys(map(_shortened, said)))
    return Prediction([found[p] for p in tensors_of], _bound(params) + whole, notes)


def _dense(p: Tensor | ParamSpec, moments: int) -> int:
    """Return the bytes of ``moments`` moments of a parameter, but at least of two, in fp32 (fp64)."""
    elements = p.numel() if isinstance(p, Tensor) else p.elements
    return max(2, moments) * elements * accumulator(p.dtype).itemsize


def _keeps_adamws(plan: ParamPlan) -> bool:
    return not plan.projection and {moment.meaning.of for moment, _ in plan.kept} >= {*PLAIN_MEANS}


def is_ours(name: str) -> bool:
    """Say whether ``name`` is none of torch's own optimizers."""
    return issubclass(REGISTRY.get(name, CompressedOptimizer), CompressedOptimizer)


def _placeholder(p: ParamSpec, flat: bool = False) -> Tensor:
    tensor = torch.empty(p.shape, dtype=p.dtype, device="meta")
    return tensor.requires_grad_() if flat else nn.Parameter(tensor)


def _groups(params: Sequence[ParamSpec], tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups of named tensors, one for each combination of group options."""
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[str, Tensor]]] = {}
    for p, tensor in zip(params, tensors, strict=True):
        groups.setdefault(p.options, []).append((p.name, tensor))
    return [{"params": members, **dict(extra)} for extra, members in groups.items()]


def _create(name: str, groups: list[dict[str, Any]], options: Mapping[str, Any]) -> Optimizer:
    try:
        return create(name, groups, **options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None


def _stepped(name: str, params: Sequence[ParamSpec], options: Mapping[str, Any], foreach: bool) -> Prediction:
    """Predict state and temporaries of an optimizer that creates its state only in its step.

    Such an optimizer treats parameters of one shape, dtype and group alike, so one of each takes the step. All at once
    (foreach) their temporaries add up, one by one only the largest counts, and fused kernels have none.
    """
    fused = bool(options.get("fused"))
    given = {**options, "fused": False} if fused else dict(options)  # fused kernels refuse the meta device
    given.setdefault("foreach", foreach and not fused)
    found: dict[Any, tuple[StoredTensors, int]] = {}
    for p in params:
        key = (p.shape, p.dtype, p.options)
        if key not in found:
            found[key] = _step(name, p, given)
    each = [(p, *found[p.shape, p.dtype, p.options]) for p in params]
    peaks = [temporaries for *_, temporaries in each]
    kept = [Predicted(tensors, _dense(p, 2), tensors.keys() >= {"exp_avg", "exp_avg_sq"}) for p, tensors, _ in each]
    return Prediction(kept, 0 if fused else sum(peaks) if given["foreach"] else max(peaks))


def _step(name: str, spec: ParamSpec, options: Mapping[str, Any]) -> tuple[StoredTensors, int]:
    """Return the state after a step on one parameter, and the peak of the second step's temporaries in bytes."""
    p = _placeholder(spec)
    optimizer = _create(name, _groups([spec], [p]), options)
    p.grad = torch.empty_like(p)
    try:
        optimizer.step()
        state = [value for value in optimizer.state.get(p, {}).values() if isinstance(value, Tensor)]
        with LiveTensors([p, p.grad, *state]) as live:
            optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{name} cannot be planned: its step does not run on shapes alone ({error})") from None
    return _found(p, optimizer.state.get(p, {})), live.peak


def _found(p: Tensor, state: Mapping[str, Any]) -> StoredTensors:
    """Return what is in the state of ``p``; a plain number counts as a tensor of 8 bytes."""
    tensors: StoredTensors = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[str(key)] = ComponentSpec("", tuple(value.shape), value.dtype, follows=value.shape == p.shape)
        elif isinstance(value, (int, float)):
            tensors[str(key)] = ComponentSpec("", (), torch.int64, follows=False)
    return tensors


def sizes(tensors: StoredTensors) -> dict[str, int]:
    return {key: spec.nbytes for key, spec in tensors.items()}


def _bound(params: Sequence[ParamSpec]) -> int:
    """Bound the temporary bytes of a step of daypack's optimizers, which work on one row chunk at a time."""
    largest = max(p.elements for p in params)
    return STEP_BUFFERS * 4 * min(CHUNK_ELEMENTS, largest)


def _shortened(text: str, length: int = 240) -> str:
    """Return a warning without the end of a long list of names."""
    return text if len(text) <= length else text[: text.rfind(",", 0, length)] + ", ..."
