"""State of other libraries and of files without a schema, brought into one form: a snapshot of known layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from daypack.checkpoint import file as files
from daypack.checkpoint import libraries, moments, snapshot
from daypack.checkpoint.moments import PLAIN, Storage
from daypack.checkpoint.save_load import torch_class
from daypack.checkpoint.snapshot import ParamState, Snapshot, Stored, Value
from daypack.checkpoint.torch_files import class_in, file_damage, is_safetensors, torch_load, weights_in
from daypack.optim.base import CompressedOptimizer
from daypack.optim.registry import REGISTRY, create

#: Classes of bitsandbytes and torchao by a part of their names, and the class of `PLAIN` that stores the same moments.
_FAMILIES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "adam": "Adam"}
_OTHERS = ("ademamix", "adagrad", "rmsprop", "lars", "lamb")


def family(name: str) -> str:
    """Return the class of `PLAIN` whose moments an optimizer called ``name`` keeps.

    Raises:
        ValueError: none.
    """
    low = name.lower()
    if not any(part in low for part in _OTHERS):
        for part, cls in _FAMILIES.items():
            if part in low:
                return cls
    raise ValueError(f"state of {name} is not known; known are {', '.join(PLAIN)} and their 8-bit forms")


def storages(source: Snapshot) -> Callable[[str], Storage]:
    """Return a function from a parameter's name to how its state is stored in the snapshot."""
    options = {name: group for group, names in source.groups for name in names}
    if source.optimizer in PLAIN:

        def plain(name: str) -> Storage:
            return PLAIN[source.optimizer]

        return plain
    optimizer = _empty(source.optimizer)

    def ours(name: str) -> Storage:
        entry, group = source.params[name], {**optimizer.defaults, **options[name]}
        try:
            return moments.storage(optimizer, group, entry.shape, entry.dtype, name)
        except TypeError as error:
            raise ValueError(
                f"an option of the group of parameter {name} is damaged ({error}); use another checkpoint"
            ) from None

    return ours


def _empty(cls_name: str) -> Optimizer:
    """Build one of our optimizers over no parameters, to ask it for plans."""
    for name, cls in REGISTRY.items():
        if cls.__name__ == cls_name and issubclass(cls, CompressedOptimizer):
            return create(name, [Parameter(torch.empty(0))])
    known = sorted({*PLAIN, *(cls.__name__ for cls in REGISTRY.values())})
    raise ValueError(f"state of {cls_name} is not known; known are {', '.join(known)}")


def options_of(source: Snapshot) -> set[str]:
    """Return the options of the class that saved a snapshot; other keys of its groups are the user's own."""
    if source.optimizer in PLAIN:
        return {*torch.optim.AdamW([torch.empty(0)]).defaults, *torch.optim.SGD([torch.empty(0)]).defaults}
    return {*_empty(source.optimizer).defaults}


# ------------------------------------------------------------------ live ones


def take(optimizer: Optimizer) -> Snapshot:
    """Take a snapshot of an optimizer, as `snapshot.take` does; also of bitsandbytes' and torchao's."""
    home = type(optimizer).__module__.split(".")[0]
    if home not in ("bitsandbytes", "torchao"):
        if not isinstance(optimizer, CompressedOptimizer):
            torch_class(optimizer)  # raises for what is not known
        return snapshot.take(optimizer)
    names, named = snapshot.names_of(optimizer)
    shapes = {
        name: (tuple(p.shape), p.dtype)
        for members, group in zip(names, optimizer.param_groups, strict=True)
        for name, p in zip(members, group["params"], strict=True)
    }
    return of_state_dict(optimizer.state_dict(), family(type(optimizer).__name__), shapes, named)


# -------------------------------------------------------------- state dicts


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def of_state_dict(
    packed: Mapping[str, Any], cls_name: str | None, shapes: Shapes | None, named: bool, source: str = "this mapping"
) -> Snapshot:
    """Return a snapshot of a ``state_dict()``.

    Args:
        cls_name: the optimizer's class; None: found from what the state holds.
        shapes: shape and dtype of each parameter by name; None: found from the state, dtype fp32 (fp64 for fp64 state).
        named: whether names in ``packed`` are the parameters' own.
        source: where it comes from, for errors.

    Raises:
        ValueError: not the state of an optimizer that is known.
    """
    if not {"state", "param_groups"} <= packed.keys():
        raise ValueError(
            f"{source} is not the state of an optimizer; pass its state_dict(), or what torch.save made of that"
        )
    try:
        return _of_packed(packed, cls_name, shapes, named)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{source} is not a state_dict as optimizers save it ({type(error).__name__}: {error})"
        ) from None


def _of_packed(packed: Mapping[str, Any], cls_name: str | None, shapes: Shapes | None, named: bool) -> Snapshot:
    groups, params = [], {}
    names_by_group = [_names(group) for group in packed["param_groups"]]
    named = named and all(names is not None for names in names_by_group)
    for g, (group, own) in enumerate(zip(packed["param_groups"], names_by_group, strict=True)):
        names = own if named and own else [f"{g}.{i}" for i in range(len(group["params"]))]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name, key in zip(names, group["params"], strict=True):
            if name in params:
                raise ValueError(
                    f"two parameters of the saved state are called {name}; save it with param_names that differ"
                )
            state = libraries.entry(packed["state"].get(key, {}))
            shape, dtype = shapes[name] if shapes and name in shapes else _shape(state)
            params[name] = ParamState(shape, dtype, _shaped(state, shape))
        groups.append((options, tuple(names)))
    found = Snapshot(cls_name or "", tuple(groups), params, named)
    cls_name = cls_name or _guess(found)
    if cls_name == "SGD":  # bitsandbytes has momentum and dampening under the name betas
        groups = [(_momentum(options), names) for options, names in groups]
    renamed = {name: _renamed(entry, cls_name) for name, entry in params.items()}
    result = Snapshot(cls_name, tuple(groups), renamed, named)
    _check_kind(result)
    return result


def _names(group: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a group's parameters, or None. In distributed checkpoints the keys are names."""
    keys = group["params"]
    if keys and all(isinstance(key, str) for key in keys):
        return list(keys)
    names = list(group.get("param_names") or ())
    return names if len(names) == len(keys) else None


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild a state dict from the flat keys of torch's distributed checkpoints, ``state.<name>.<key>`` and
    ``param_groups.<name>.<option>``. Parameters with equal options form a group.
    """
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        place, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if place not in ("state", "param_groups") or not name:
            raise ValueError(f"{path!r} is no entry of an optimizer's flattened state_dict")
        (state if place == "state" else options).setdefault(name, {})[key] = value
    if lost := state.keys() - options.keys():
        raise ValueError(f"param_groups.{min(lost)} has no entries though state.{min(lost)} has; save both")
    groups: list[dict[str, Any]] = []
    for name, own in options.items():
        own = {key: value for key, value in own.items() if key != "param_names"}
        group = next((group for group in groups if {k: v for k, v in group.items() if k != "params"} == own), None)
        if group is None:
            groups.append(group := {**own, "params": []})
        group["params"].append(name)
    return {"state": state, "param_groups": groups}


def _check_kind(found: Snapshot) -> None:
    """Refuse state that is not what its optimizer class keeps.

    Raises:
        ValueError: naming the parameter, what it has and what it should have.
    """
    plain = PLAIN.get(found.optimizer)
    needed = {moment.key for moment in plain.moments.values()} if plain else set()
    optimizer = None if plain else _empty(found.optimizer)
    for options, names in found.groups:
        for name in names:
            entry = found.params[name]
            if not entry.state:
                continue
            if optimizer is not None:
                needed = _shapes_of(optimizer, options, entry, name).keys() - {"step"}
            if not needed <= entry.state.keys() <= needed | {"step", "max_exp_avg_sq"}:
                raise ValueError(
                    f"the state of parameter {name} has {', '.join(sorted(entry.state))}; {found.optimizer} keeps "
                    f"{', '.join(sorted(needed))}; name the optimizer that saved it, or leave that to be found out"
                )


def _momentum(options: dict[str, Any]) -> dict[str, Any]:
    if "momentum" in options:
        return options
    momentum, dampening = options["betas"]
    return {"momentum": momentum, "dampening": dampening, **{k: v for k, v in options.items() if k != "betas"}}


def _shape(state: Mapping[str, Value]) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a parameter, as far as its state tells.

    Raises:
        ValueError: it does not tell.
    """
    if "basis" in state:
        raise ValueError(
            "low-rank state does not tell the shapes of its parameters; give a file of daypack.checkpoint.save_file or "
            "of daypack train"
        )
    row, col = state.get("exp_avg_sq_row"), state.get("exp_avg_sq_col")
    if "exp_avg" not in state and "exp_avg_codes" not in state and isinstance(row, Stored) and isinstance(col, Stored):
        return (*row.shape, col.shape[-1]), torch.float64 if row.dtype == torch.float64 else torch.float32
    for key in ("exp_avg", "momentum_buffer", "exp_avg_codes", "exp_avg_sq"):
        value = state.get(key)
        if isinstance(value, (Stored, Tensor)):
            wide = any(isinstance(v, Stored) and v.dtype == torch.float64 for v in state.values())
            dtype = torch.float64 if wide else torch.float32 if value.dtype == torch.uint8 else value.dtype
            return tuple(value.shape), dtype
    return (0,), torch.float32


def _shaped(state: dict[str, Value], shape: tuple[int, ...]) -> dict[str, Value]:
    for key in ("exp_avg", "exp_avg_sq"):
        value = state.get(key)
        if isinstance(value, Stored) and value.shape != shape:
            raise ValueError(f"{key} has shape {value.shape}, its parameter {shape}")
    return state


def _renamed(entry: ParamState, cls_name: str) -> ParamState:
    """Return an entry with its moments under the names that `PLAIN` gives them."""
    if cls_name != "SGD" or "exp_avg" not in entry.state:
        return entry
    state = {"momentum_buffer" if key == "exp_avg" else key: value for key, value in entry.state.items()}
    return ParamState(entry.shape, entry.dtype, state)


def _guess(found: Snapshot) -> str:
    """Find the class whose state this is: ours whose plans name exactly these tensors, or one of torch's.

    Raises:
        ValueError: none, or several.
    """
    entries = [(options, name) for options, names in found.groups for name in names if found.params[name].state]
    keys = {key for _, name in entries for key in found.params[name].state} - {"step"}
    if keys <= {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} and "exp_avg_sq" in keys:
        if all(options.keys() >= {"nonfinite"} for options, _ in entries):
            return _ours(found, entries)
        return "Adam" if any(options.get("decoupled_weight_decay") is False for options, _ in entries) else "AdamW"
    if keys == {"momentum_buffer"}:
        return "SGD"
    return _ours(found, entries)


def _ours(found: Snapshot, entries: list[tuple[dict[str, Any], str]]) -> str:
    fitting = []
    for cls in REGISTRY.values():
        if issubclass(cls, CompressedOptimizer) and entries:
            optimizer = _empty(cls.__name__)
            if all(_fits(optimizer, options, found.params[name], name) for options, name in entries):
                fitting.append(cls.__name__)
    if len(fitting) == 1:
        return fitting[0]
    problem = f"fits several optimizers ({', '.join(fitting)})" if fitting else "is not known"
    raise ValueError(f"the optimizer of this state {problem}; say which one saved it with --from")


def _fits(optimizer: CompressedOptimizer | Optimizer, options: Mapping[str, Any], entry: ParamState, name: str) -> bool:
    assert isinstance(optimizer, CompressedOptimizer)
    if not options.keys() >= optimizer.defaults.keys() - {"bits"}:
        return False
    try:
        needed = _shapes_of(optimizer, options, entry, name)
    except (ValueError, KeyError, TypeError):
        return False
    return needed == {k: tuple(v.shape) if isinstance(v, (Stored, Tensor)) else () for k, v in entry.state.items()}


def _shapes_of(
    optimizer: Optimizer, options: Mapping[str, Any], entry: ParamState, name: str
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that one of our optimizers keeps of a parameter, by key.

    Raises:
        ValueError: the group's options are not this optimizer's.
    """
    assert isinstance(optimizer, CompressedOptimizer)
    plan = optimizer.plan(torch.Size(entry.shape), entry.dtype, {**optimizer.defaults, **options}, name)
    rule = optimizer.main_rule({**optimizer.defaults, **options}).name
    if options.get("rule", rule) != rule:
        raise ValueError(f"the group of parameter {name} was updated by {options['rule']}, not by {rule}")
    return {"step": (), **{key: spec.shape for key, spec in plan.specs(entry.shape, entry.dtype, saved=True).items()}}


# -------------------------------------------------------------------- files


def read(path: Path, cls_name: str | None = None) -> Snapshot:
    """Return the state that `read_with_weights` reads, without the weights."""
    return read_with_weights(path, cls_name)[0]


def read_with_weights(path: Path, cls_name: str | None = None) -> tuple[Snapshot, Mapping[str, Tensor]]:
    """Read state from any known file: our safetensors (or their shards), an optimizer's ``state_dict()`` from
    ``torch.save``, or a training checkpoint (a dict with weights and such a ``state_dict()``). No code in the file is
    run.

    Args:
        cls_name: who saved it, for a ``state_dict()`` that leaves it open: a registered name or a family.

    Returns:
        The state, and the model's weights by name as far as the file holds them too.

    Raises:
        ValueError: missing, damaged, none of these, or not of ``cls_name``.
    """
    if not path.is_file() or is_safetensors(path):
        return _confirmed(files.read(path), cls_name, path), {}
    content = torch_load(path)
    weights, cls = weights_in(content), class_in(content)
    if cls and (fault := file_damage(path)):
        raise ValueError(f"damaged checkpoint {path}: {fault}; use another checkpoint")
    for key in ("optimizer", "optimizer_state_dict", "optim"):
        if isinstance(content, dict) and "param_groups" not in content and isinstance(content.get(key), dict):
            content = content[key]
    if isinstance(content, dict) and content and all(str(k).startswith(("state.", "param_groups.")) for k in content):
        content = _nested(content)
    if cls and "param_groups" not in content:
        raise ValueError(f"{path} holds no optimizer state")
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    packed = content if isinstance(content, dict) else {}
    found = of_state_dict(packed, cls or (cls_name and _class(cls_name)), shapes, named=True, source=str(path))
    return (_confirmed(found, cls_name, path) if cls else found), weights


def _confirmed(found: Snapshot, name: str | None, path: Path) -> Snapshot:
    """Return ``found``, which names its own optimizer, after checking that ``name`` is None or agrees."""
    if name is not None and _class(name) != found.optimizer:
        raise ValueError(f"{path} says that {found.optimizer} saved it, not {name}; leave --from out")
    return found


def of_any(
    state: Optimizer | Snapshot | Mapping[str, Any] | str | os.PathLike[str], cls_name: str | None = None
) -> Snapshot:
    """Return a snapshot of state in any form: an optimizer, its ``state_dict()``, or a file of either kind.

    Args:
        cls_name: the optimizer that saved it, where a ``state_dict()`` or a file does not tell.
    """
    if isinstance(state, Snapshot):
        return state
    if isinstance(state, Optimizer):
        return take(state)
    if isinstance(state, Mapping):
        return of_state_dict(state, cls_name and _class(cls_name), None, named=True)
    return read(Path(state), cls_name)


def _class(name: str) -> str:
    """Return the class that a user means: a registered name, or a family of other libraries' optimizers."""
    return REGISTRY[name].__name__ if name in REGISTRY else family(name)
