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
from daypack.checkpoint import moments, snapshot
from daypack.checkpoint.content import is_safetensors, torch_load, weights_in
from daypack.checkpoint.live import torch_class
from daypack.checkpoint.moments import PLAIN, Layout
from daypack.checkpoint.snapshot import Coded, ParamState, Snapshot, Stored, Value
from daypack.optim.base import CompressedOptimizer
from daypack.optim.registry import REGISTRY, create
from daypack.optim.state_dict import specs_of

#: Where bitsandbytes hides its tensors from FSDP.
_BNB_NEST = "__bnb_optimizer_quant_state__"
#: Its block sizes: of 0.44 and later, and of earlier versions.
_BNB_BLOCKS = (256, 2048)
#: Classes of bitsandbytes and torchao by a part of their names, and the class of `PLAIN` that stores the same moments.
_FAMILIES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "adam": "Adam"}
_OTHERS = ("ademamix", "adagrad", "rmsprop", "lars", "lamb")


def family(name: str) -> str:
    """The class of `PLAIN` whose moments an optimizer called ``name`` keeps.

    Raises:
        ValueError: none.
    """
    low = name.lower()
    if not any(part in low for part in _OTHERS):
        for part, cls in _FAMILIES.items():
            if part in low:
                return cls
    raise ValueError(f"state of {name} is not known; known are {', '.join(PLAIN)} and their 8-bit forms")


def layouts(source: Snapshot) -> Callable[[str], Layout]:
    """How the state of each parameter of a snapshot is stored."""
    options = {name: group for group, names in source.groups for name in names}
    if source.optimizer in PLAIN:

        def plain(name: str) -> Layout:
            return PLAIN[source.optimizer]

        return plain
    optimizer = _empty(source.optimizer)

    def ours(name: str) -> Layout:
        entry = source.params[name]
        return moments.layout(optimizer, {**optimizer.defaults, **options[name]}, entry.shape, entry.dtype, name)

    return ours


def _empty(cls_name: str) -> Optimizer:
    """An optimizer of ours over nothing, which knows the plans."""
    for name, cls in REGISTRY.items():
        if cls.__name__ == cls_name and issubclass(cls, CompressedOptimizer):
            return create(name, [Parameter(torch.empty(0))])
    known = sorted({*PLAIN, *(cls.__name__ for cls in REGISTRY.values())})
    raise ValueError(f"state of {cls_name} is not known; known are {', '.join(known)}")


def options_of(source: Snapshot) -> set[str]:
    """Options of the class that a snapshot is of; what else its groups hold is the user's."""
    if source.optimizer in PLAIN:
        return {*torch.optim.AdamW([torch.empty(0)]).defaults, *torch.optim.SGD([torch.empty(0)]).defaults}
    return {*_empty(source.optimizer).defaults}


# ------------------------------------------------------------------ live ones


def take(optimizer: Optimizer) -> Snapshot:
    """`snapshot.take`, also of bitsandbytes' and torchao's optimizers."""
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


def of_state_dict(packed: Mapping[str, Any], cls_name: str | None, shapes: Shapes | None, named: bool) -> Snapshot:
    """A snapshot of a ``state_dict()``.

    Args:
        cls_name: the optimizer's class; None: found from what the state holds.
        shapes: shape and dtype of each parameter by name; None: found from the state, dtype fp32 (fp64 for fp64 state).
        named: whether names in ``packed`` are the parameters' own.

    Raises:
        ValueError: not the state of an optimizer that is known.
    """
    groups, params = [], {}
    own = [_own_names(group) for group in packed["param_groups"]]
    named = named and all(len(names) == len(g["params"]) for names, g in zip(own, packed["param_groups"], strict=True))
    for g, group in enumerate(packed["param_groups"]):
        names = own[g] if named else [f"{g}.{i}" for i in range(len(group["params"]))]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name, key in zip(names, group["params"], strict=True):
            state = _entry(packed["state"].get(key, {}))
            shape, dtype = shapes[name] if shapes and name in shapes else _shape(state)
            params[name] = ParamState(shape, dtype, _shaped(state, shape))
        groups.append((options, tuple(names)))
    found = Snapshot(cls_name or "", tuple(groups), params, named)
    cls_name = cls_name or _guess(found)
    if cls_name == "SGD":  # bitsandbytes has momentum and dampening under the name betas
        groups = [(_momentum(options), names) for options, names in groups]
    renamed = {name: _renamed(entry, cls_name) for name, entry in params.items()}
    return Snapshot(cls_name, tuple(groups), renamed, named)


def _own_names(group: Mapping[str, Any]) -> list[str]:
    """The names of a group's parameters: in a distributed checkpoint they stand in place of their numbers."""
    names = group.get("param_names") or [key for key in group["params"] if isinstance(key, str)]
    return list(map(str, names))


def _momentum(options: dict[str, Any]) -> dict[str, Any]:
    if "momentum" in options:
        return options
    momentum, dampening = options["betas"]
    return {"momentum": momentum, "dampening": dampening, **{k: v for k, v in options.items() if k != "betas"}}


def _entry(raw: Mapping[str, Any]) -> dict[str, Value]:
    """The state of one parameter with each moment of a foreign form as a plain one that is decoded when it is read."""
    flat = {**{k: v for k, v in raw.items() if k != _BNB_NEST}, **raw.get(_BNB_NEST, {})}
    state: dict[str, Value] = {}
    for key, value in flat.items():
        if key in ("state1", "state2"):
            state["exp_avg" if key == "state1" else "exp_avg_sq"] = _bitsandbytes(flat, key[-1])
        elif key.startswith(("qmap", "absmax", "new_max", "max", "unorm_vec", "gnorm_vec")) and "state1" in flat:
            continue
        elif isinstance(value, Tensor) and hasattr(value, "dequantize") and hasattr(value, "codes"):
            state[key] = Stored(tuple(value.shape), torch.float32, _dequantized(value), True, coded=_torchao(value))
        elif isinstance(value, Tensor):
            state[key] = value if value.dim() == 0 else snapshot.of_tensor(value, True)
        elif value is None or isinstance(value, (int, float)):
            state[key] = value
        else:
            raise ValueError(f"{key} of a parameter is a {type(value).__name__}; only tensors and numbers are known")
    if "state1" in flat and "step" in state and not isinstance(state["step"], Tensor):
        state["step"] = torch.tensor(float(state["step"]))  # type: ignore[arg-type]
    return state


def _dequantized(value: Any) -> Callable[[int, int], Tensor]:
    """torchao's own decoding: 8 bits, 4 bits, fp8."""

    def read(start: int, stop: int) -> Tensor:
        whole: Tensor = value.dequantize(torch.float32)
        return whole.narrow(0, start, stop - start)

    return read


def _torchao(value: Any) -> Coded | None:
    """What a tensor of torchao holds: codes (two in a byte with 4 bits), a scale per block, and their levels."""
    codes, scale = value.codes, getattr(value, "scale", None)
    if not isinstance(scale, Tensor) or not scale.numel():
        return None
    form = "fp8" if codes.is_floating_point() else "8-bit" if codes.numel() == value.numel() else "4-bit"
    return Coded(form, codes, scale, getattr(value, "qmap", None), value.numel() // scale.numel())


def _bitsandbytes(flat: Mapping[str, Any], index: str) -> Value:
    """``qmap[code] * absmax`` over blocks of 256 elements of the flattened tensor, or fp32 as it is.

    Raises:
        ValueError: the old form with one scale for the whole tensor.
    """
    codes = flat["state" + index]
    if codes.dtype != torch.uint8:
        return snapshot.of_tensor(codes, True) if codes.dim() else codes
    absmax, levels = flat.get("absmax" + index), flat.get("qmap" + index)
    if absmax is None or levels is None:
        raise ValueError(
            "this is bitsandbytes' state with one scale per tensor (before 0.44, block_wise=False), which is not known"
        )
    fitting = [size for size in _BNB_BLOCKS if -(-codes.numel() // size) == absmax.numel()]
    if not fitting:
        raise ValueError(f"absmax{index} has {absmax.numel()} blocks for {codes.numel()} elements, which is not known")
    size = fitting[0]
    row = codes[:1].numel()

    def read(start: int, stop: int) -> Tensor:
        first, last = start * row, stop * row
        part = levels.index_select(0, codes.reshape(-1)[first:last].int())
        blocks = torch.arange(first, last, device=codes.device) // size
        value: Tensor = (part * absmax.index_select(0, blocks)).view(stop - start, *codes.shape[1:])
        return value

    coded = Coded("8-bit", codes, absmax, levels, size)
    return Stored(tuple(codes.shape), torch.float32, read, True, coded=coded)


def _shape(state: Mapping[str, Value]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a parameter, as far as its state tells.

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
    """Moments under the names that `PLAIN` gives them."""
    if cls_name != "SGD" or "exp_avg" not in entry.state:
        return entry
    state = {"momentum_buffer" if key == "exp_avg" else key: value for key, value in entry.state.items()}
    return ParamState(entry.shape, entry.dtype, state)


def _guess(found: Snapshot) -> str:
    """The class whose state this is: the one of ours whose plans name just these tensors, or one of torch's.

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
        plan = optimizer.plan(torch.Size(entry.shape), entry.dtype, dict(options), name)
    except (ValueError, KeyError):
        return False
    specs = {key: spec.shape for key, spec in specs_of(torch.empty(entry.shape, device="meta"), plan).items()}
    shapes = {k: tuple(v.shape) if isinstance(v, (Stored, Tensor)) else () for k, v in entry.state.items()}
    return options.get("rule", plan.rule.name) == plan.rule.name and {"step": (), **specs} == shapes


# -------------------------------------------------------------------- files


def read(path: Path, cls_name: str | None = None) -> Snapshot:
    """The state of `read_with_weights` alone."""
    return read_with_weights(path, cls_name)[0]


def read_with_weights(path: Path, cls_name: str | None = None) -> tuple[Snapshot, Mapping[str, Tensor]]:
    """State in any file that is known: our safetensors (or their shards), what ``torch.save`` made of an optimizer's
    ``state_dict()``, or a checkpoint of ``daypack train``. Nothing in it is run.

    Returns:
        The state, and the model's weights by name as far as the file holds them too.

    Raises:
        ValueError: missing, damaged, or none of these.
    """
    if not path.is_file() or is_safetensors(path):
        return files.read(path), {}
    from daypack.training.checkpoint import FORMAT, load_checkpoint

    content = torch_load(path)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        checkpoint = load_checkpoint(path)
        if checkpoint.optimizer is None:
            raise ValueError(f"{path} holds no optimizer state")
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in checkpoint.model.items()}
        cls = REGISTRY[checkpoint.config.optimizer].__name__
        return of_state_dict(checkpoint.optimizer, cls, shapes, named=True), checkpoint.model
    weights = weights_in(content)
    for key in ("optimizer", "optimizer_state_dict", "optim"):
        if isinstance(content, dict) and "param_groups" not in content and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        raise ValueError(f"{path} is not the state of an optimizer; pass what torch.save made of its state_dict()")
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}
    try:
        return of_state_dict(content, cls_name and _class(cls_name), shapes, named=True), weights
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a state_dict as optimizers save it ({type(error).__name__}: {error})"
        ) from None


def of_any(
    state: Optimizer | Snapshot | Mapping[str, Any] | str | os.PathLike[str], cls_name: str | None = None
) -> Snapshot:
    """State in whatever form it is: an optimizer, its ``state_dict()``, a file of either kind.

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
    """The class that a user means: a registered name, or a family of other libraries' optimizers."""
    return REGISTRY[name].__name__ if name in REGISTRY else family(name)
