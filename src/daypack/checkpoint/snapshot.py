"""Saved state in memory: files are written from it and read into it, and conversion works on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack import sharding
from daypack.optim.base import CompressedOptimizer
from daypack.optim.state_dict import specs_of


@dataclass(frozen=True)
class Coded:
    """What another library keeps in place of a moment.

    Attributes:
        form: for people: "8-bit", "4-bit", "fp8".
        codes: one an element, shaped like the moment, or packed.
        scale: one per block of the flattened moment.
        levels: what 8-bit codes stand for, times the scale; None where the codes are numbers themselves.
        block_size: elements per scale.
    """

    form: str
    codes: Tensor
    scale: Tensor
    levels: Tensor | None
    block_size: int


@dataclass(frozen=True)
class Stored:
    """A tensor that is read when it is needed, whole or some rows of it.

    Attributes:
        shape: of the whole tensor, at least one dim.
        dtype: storage type.
        read: rows ``[start, stop)`` of dim 0; what it returns may be a view of memory that must not be changed.
        follows: dim 0 is dim 0 of the parameter, so that a shard of the one is a shard of the other.
        held: the rows that are here, where the rest lies elsewhere; None: all of them.
        coded: another library's own form, where ``read`` decodes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    follows: bool = False
    held: tuple[int, int] | None = None
    coded: Coded | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def whole(self) -> Tensor:
        return self.read(0, self.shape[0])

    def part(self, start: int, stop: int) -> Stored:
        """Return this tensor as a shard holds it: rows ``start`` to ``stop``."""
        return replace(self, held=(start, stop))


#: A tensor with dims; a number that is a 0-dim tensor; a plain one.
Value: TypeAlias = "Stored | Tensor | int | float | None"


@dataclass(frozen=True)
class ParamState:
    """The state of one parameter, and what is known of the parameter itself. ``state`` is empty if it has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    state: Mapping[str, Value]


@dataclass(frozen=True)
class Snapshot:
    """The state of an optimizer.

    Attributes:
        optimizer: name of its class.
        groups: options of each group and the names of its parameters, in order.
        params: by name, in the order of the groups.
        named: whether the names are the parameters' own; else they are ``<group>.<index>``.
        metadata: what the user added.
    """

    optimizer: str
    groups: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]
    params: Mapping[str, ParamState]
    named: bool
    metadata: Mapping[str, str] = field(default_factory=dict)


def of_tensor(tensor: Tensor, follows: bool = False) -> Stored:
    """Return a tensor in memory as `Stored`; of a DTensor, the rows here, on the first rank that holds them."""
    local, (start, stop), first = sharding.to_local(tensor.detach()), *sharding.rows_of(tensor)

    def read(begin: int, end: int) -> Tensor:
        return local.narrow(0, begin - start, end - begin)

    shape = tuple(tensor.shape)
    if not sharding.is_distributed(tensor):
        return Stored(shape, tensor.dtype, read, follows)
    return Stored(shape, tensor.dtype, read, True, (start, stop) if first else (start, start))


def names_of(optimizer: Optimizer) -> tuple[list[list[str]], bool]:
    """Return the names of each group's parameters, and whether they are the parameters' own (all named, none twice)."""
    names = [list(map(str, group.get("param_names") or ())) for group in optimizer.param_groups]
    every = [name for group in names for name in group]
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in names] == counts and len({*every}) == len(every):
        return names, True
    return [[f"{g}.{i}" for i in range(count)] for g, count in enumerate(counts)], False


def take(optimizer: Optimizer, metadata: Mapping[str, str] | None = None) -> Snapshot:
    """Return the state of a live optimizer. Nothing is copied: it changes with the next step.

    Raises:
        ValueError: the state holds something that is neither a tensor nor a number.
    """
    packed, (names, named) = optimizer.state_dict(), names_of(optimizer)
    groups, params = [], {}
    for saved, live, members in zip(packed["param_groups"], optimizer.param_groups, names, strict=True):
        options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        groups.append((options, tuple(members)))
        for name, key, p in zip(members, saved["params"], live["params"], strict=True):
            entry = packed["state"].get(key, {})
            following = _following(optimizer, live, name, p, entry)
            state = {key: _value(name, key, value, key in following) for key, value in entry.items()}
            params[name] = ParamState(tuple(p.shape), p.dtype, state)
    return Snapshot(type(optimizer).__name__, tuple(groups), params, named, dict(metadata or {}))


def _following(
    optimizer: Optimizer, group: Mapping[str, Any], name: str, p: Tensor, entry: Mapping[str, Any]
) -> set[str]:
    """Return the state keys whose dim 0 is that of the parameter."""
    if isinstance(optimizer, CompressedOptimizer):
        plan = optimizer.plan(p.shape, p.dtype, dict(group), name)
        return {key for key, spec in specs_of(p, plan).items() if spec.follows}
    return {key for key, value in entry.items() if isinstance(value, Tensor) and value.shape == p.shape}


def _value(name: str, key: str, value: Any, follows: bool) -> Value:
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return sharding.to_local(value).detach().cpu()
        return of_tensor(value, follows)
    if value is None or isinstance(value, (int, float)):
        return value
    raise ValueError(
        f"{key} of parameter {name} is a {type(value).__name__}; only tensors and numbers can be saved, as daypack's "
        "optimizers and torch's Adam, AdamW and SGD have them"
    )
