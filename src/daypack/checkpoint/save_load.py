"""Saving a live optimizer to files and loading it back."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from daypack import sharding
from daypack.checkpoint import file as files
from daypack.checkpoint.atomic import write_whole
from daypack.checkpoint.header import Malformed
from daypack.checkpoint.snapshot import ParamState, Snapshot, Stored, names_of, take
from daypack.formats.base import ComponentSpec
from daypack.optim.base import CompressedOptimizer
from daypack.optim.options import plain_name
from daypack.optim.state_dict import _match, _step

_T = TypeVar("_T")

#: State of torch's own classes that is shaped like the parameter. AdamW, which is an Adam to Python, comes first.
TORCH_STATE: dict[type[Optimizer], tuple[str, ...]] = {
    AdamW: ("exp_avg", "exp_avg_sq"),
    Adam: ("exp_avg", "exp_avg_sq"),
    SGD: ("momentum_buffer",),
}


def save_file(optimizer: Optimizer, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Save the state of an optimizer as safetensors, whole or not at all; `docs/checkpoint-format.md` has the schema.

    ``path`` (its folder must exist) keeps its old content until all of the new one is on the disk. With sharded
    parameters (DTensors) every rank calls this and writes its own file, ``path`` with ``-00001-of-00004`` or so before
    its ending, and ``path`` becomes the index of these files when all of them are there. All ranks of the job must hold
    a DTensor then; where only some do, these wait for the others.

    Args:
        optimizer: one of daypack's, or torch's Adam, AdamW or SGD.
        metadata: texts of your own, which `load_file` returns.

    Raises:
        ValueError: the state cannot be saved, or a file not be written, here or on another rank.
    """
    path, params = Path(path), _params(optimizer)
    rank, world = sharding.rank_of(params)

    def write(temporary: Path) -> None:  # files get their names only when all are written
        _everywhere(params, path, lambda: files.write(temporary, take(optimizer, metadata), rank, world))

    if world == 1:
        _everywhere(params, path, lambda: write_whole(path, write))
        files.sweep(path)
        return
    slot = _everywhere(params, path, lambda: files.free_slot(path, world) if rank == 0 else "")
    slot = "b" if sharding.add_up_everywhere(params, slot == "b") else ""
    shards = [files.shard_path(path, index, world, slot) for index in range(world)]
    _everywhere(params, path, lambda: write_whole(shards[rank], write))
    _everywhere(params, path, lambda: files.commit(path, shards) if rank == 0 else None)


def _everywhere(params: Sequence[Tensor], path: Path, act: Callable[[], _T]) -> _T:
    """Call ``act`` and return its result. If it fails on one rank, all ranks raise, so that none waits for another."""
    result, error = None, None
    try:
        result = act()
    except ValueError as problem:
        error = problem
    except OSError as problem:
        error = ValueError(f"cannot write {path}: {problem.strerror or problem}; check the folder and its space")
    sharding.agree_everywhere(params, error)
    return result  # type: ignore[return-value]


def load_file(optimizer: Optimizer, path: str | os.PathLike[str]) -> dict[str, str]:
    """Load what `save_file` saved, on any number of ranks, all of it or nothing.

    Reads what is needed when it is needed; each rank reads its own rows. Checks are those of the optimizer's own
    ``load_state_dict``, and every byte that is read is checked against its checksum.

    Args:
        path: as it was given to `save_file`.

    Returns:
        The ``metadata`` that was saved.

    Raises:
        ValueError: missing, damaged, incomplete, or the state of another optimizer. The optimizer is unchanged then.
    """
    snapshot, error = None, None
    try:
        snapshot = files.read(Path(path))
        _check_class(optimizer, snapshot, Path(path))
    except ValueError as problem:
        error = problem
    except OSError as problem:
        error = ValueError(f"cannot read {path}: {problem.strerror or problem}; check its permissions")
    sharding.agree_everywhere(_params(optimizer), error)
    assert snapshot is not None
    publish(snapshot, optimizer)
    return dict(snapshot.metadata)


def publish(snapshot: Snapshot, optimizer: Optimizer) -> None:
    """Put a snapshot's state into ``optimizer``, all of it or nothing.

    Raises:
        ValueError: it does not fit.
    """
    content = state_dict_of(snapshot, optimizer)
    try:
        if not isinstance(optimizer, CompressedOptimizer):
            content = _checked(content, optimizer)
        optimizer.load_state_dict(content)
    except Malformed as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"the saved state does not fit: {problem:.300}; use another checkpoint") from None


def state_dict_of(snapshot: Snapshot, optimizer: Optimizer) -> dict[str, Any]:
    """Return a snapshot as torch's ``state_dict`` for ``optimizer``; each parameter's state is read when it is looked
    up.
    """
    names = [name for _, members in snapshot.groups for name in members]
    keys = {name: key for key, name in enumerate(names)}
    groups = []
    for options, members in snapshot.groups:
        named = {"param_names": list(members)} if snapshot.named else {}
        groups.append({**options, **named, "params": [keys[name] for name in members]})
    state = _LazyState({keys[name]: entry for name, entry in snapshot.params.items() if entry.state})
    state.live = _live_params(snapshot, optimizer, keys)
    return {"state": state, "param_groups": groups}


class _LazyState(Mapping[int, dict[str, Any]]):
    """The state of each parameter, put together anew whenever it is asked for, so that nothing is kept.

    Attributes:
        live: the parameter that will take an entry; of sharded ones only this rank's rows are read.
    """

    def __init__(self, entries: Mapping[int, ParamState]) -> None:
        self._entries = entries
        self.live: Mapping[int, Tensor] = {}

    def __getitem__(self, key: int) -> dict[str, Any]:
        entry, p = self._entries[key], self.live.get(key)
        return {k: _local(v, p) if isinstance(v, Stored) else v for k, v in entry.state.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _local(value: Stored, p: Tensor | None) -> Tensor:
    """Return a saved tensor for parameter ``p``: a DTensor of this rank's rows if ``p`` is one, else all of it."""
    if p is None or not (value.follows and sharding.is_distributed(p) and value.shape[0] == p.shape[0]):
        return value.whole()
    (start, stop), _ = sharding.rows_of(p)
    rows = value.read(start, stop).to(sharding.to_local(p).device)
    return sharding.wrap(p, rows, ComponentSpec("", value.shape, value.dtype))


def _live_params(snapshot: Snapshot, optimizer: Optimizer, keys: Mapping[str, int]) -> dict[int, Tensor]:
    """Return the live parameter for each saved one: by name where both sides have names, else by position."""
    names, named = names_of(optimizer)
    live = {
        plain_name(name): p
        for group, members in zip(optimizer.param_groups, names, strict=True)
        for name, p in zip(members, group["params"], strict=True)
    }
    if named and snapshot.named:
        return {key: live[plain_name(name)] for name, key in keys.items() if plain_name(name) in live}
    places = [f"{g}.{i}" for g, (_, members) in enumerate(snapshot.groups) for i in range(len(members))]
    by_place = dict(zip(_places(optimizer), _params(optimizer), strict=True))
    return {key: by_place[place] for key, place in enumerate(places) if place in by_place}


def _places(optimizer: Optimizer) -> list[str]:
    return [f"{g}.{i}" for g, group in enumerate(optimizer.param_groups) for i in range(len(group["params"]))]


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check_class(optimizer: Optimizer, snapshot: Snapshot, path: Path) -> None:
    names = []
    for cls in type(optimizer).__mro__:  # up to the first one that is not the user's own
        names.append(cls.__name__)
        if cls.__module__.startswith(("torch.", "daypack.")):
            break
    if snapshot.optimizer not in names:
        raise ValueError(
            f"{path} holds the state of {snapshot.optimizer}, not of {type(optimizer).__name__}; "
            "daypack.convert (or `daypack convert`) turns one into the other"
        )


# ------------------------------------------------------- torch's own classes


def torch_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return which of the known classes of torch ``optimizer`` is."""
    for cls in TORCH_STATE:
        if isinstance(optimizer, cls):
            return cls
    known = ", ".join(cls.__name__ for cls in TORCH_STATE)
    raise ValueError(f"state of {type(optimizer).__name__} is not known; daypack's optimizers and torch's {known} are")


def _checked(content: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return ``content``, read, copied and checked, for one of torch's classes, which do not check what they load.

    Raises:
        ValueError: groups, options, or the state of a parameter do not fit.
    """
    cls = torch_class(optimizer)
    groups, live_groups = [dict(group) for group in content["param_groups"]], optimizer.param_groups
    if len(groups) != len(live_groups):
        raise ValueError(f"the checkpoint has {len(groups)} parameter groups, the optimizer {len(live_groups)}")
    state: dict[int, dict[str, Any]] = {}
    for index, (group, live) in enumerate(zip(groups, live_groups, strict=True)):
        _match(group, live, index)
        missing = {key: value for key, value in live.items() if key not in group and key != "param_names"}
        group.update(missing)
        _check_options(type(optimizer), group)
        for place, (key, p) in enumerate(zip(group["params"], live["params"], strict=True)):
            entry = content["state"].get(key)
            if entry:
                name = str(group["param_names"][place]) if "param_names" in group else f"{place} of group {index}"
                state[key] = _checked_entry(cls, group, entry, name, p)
    return {"state": state, "param_groups": groups}


def _check_options(cls: type[Optimizer], group: Mapping[str, Any]) -> None:
    """Let the constructor check the options of a group."""
    arguments = {key: group[key] for key in inspect.signature(cls).parameters if key in group and key != "params"}
    try:
        cls([torch.empty(0)], **arguments)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"saved options do not fit {cls.__name__}: {error}; use another checkpoint") from None


def _checked_entry(
    cls: type[Optimizer], group: Mapping[str, Any], entry: Mapping[str, Any], name: str, p: Tensor
) -> dict[str, Any]:
    moments = {*TORCH_STATE[cls], *(("max_exp_avg_sq",) if group.get("amsgrad") else ())}
    expected = moments if cls is SGD else {*moments, "step"}
    if {*entry} != expected and not (cls is SGD and not entry):
        raise ValueError(f"the state of parameter {name} has {sorted(entry)}, needed are {sorted(expected)}")
    for key in moments & entry.keys():
        value = entry[key]
        if value is None and cls is SGD:
            continue
        if not isinstance(value, Tensor) or value.shape != p.shape or not value.is_floating_point():
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{key} of parameter {name} must have shape {tuple(p.shape)}, got {found}")
    if "step" in entry:
        _step(entry["step"], name)
    # Copies: torch keeps the tensors that it loads, and these are views of the file.
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
