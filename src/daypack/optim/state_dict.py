"""Loading optimizer state: match, validate everything, and only then let torch publish it.

torch casts every floating-point state tensor to its parameter's dtype while it loads, which would round 8-bit scales
and widen codes. Values are therefore handed to it wrapped in an object that it does not look into.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from daypack import sharding
from daypack.formats.base import ComponentSpec, State
from daypack.optim import validate
from daypack.optim.options import Group, param_name, plain_name
from daypack.param import ParamPlan
from daypack.rules.base import PLAIN_MEANS

if TYPE_CHECKING:
    from daypack.optim.base import CompressedOptimizer


#: The count of a parameter's steps; on the CPU, because Python reads it.
STEP = ComponentSpec("step", (), torch.float32, follows=False)
#: Options that say how moments decay: state saved with one that the live optimizer lacks has another meaning.
_DECAYS = ("betas", "beta2_decay", "momentum")
#: Options that say where state is kept: the live optimizer's values are used, whatever a checkpoint says.
_LIVE = {"placement", "spill_dir"}


class Keep:
    """A tensor that torch's ``load_state_dict`` passes through as it is, and what it is to become."""

    __slots__ = ("spec", "tensor")

    def __init__(self, tensor: Tensor, spec: ComponentSpec) -> None:
        self.tensor, self.spec = tensor, spec

    def copy(self, param: Tensor) -> Tensor:
        """Return a copy where the state of ``param`` is kept, sharded as ``param`` is."""
        part = sharding.place(param, self.tensor.detach(), self.spec)
        fresh = part.to(self.spec.device(param.device), copy=True, memory_format=torch.contiguous_format)
        self.tensor = fresh  # the saved one is needed no more
        return sharding.wrap(param, fresh, self.spec)


def require_dict(loaded: object) -> None:
    if not isinstance(loaded, dict):
        raise ValueError(f"a state_dict is a dict, got {type(loaded).__name__}; pass what state_dict() returned")


def prepare(optimizer: CompressedOptimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """Return ``loaded``, checked and wrapped, for torch to put into the optimizer. ``optimizer`` is only read.

    Raises:
        ValueError: groups or names do not match, or an entry does not fit its parameter, here or on another rank.
    """
    result, error = {}, None
    try:
        result = _prepared(optimizer, loaded)
    except ValueError as problem:
        error = problem
    sharding.agree([p for group in optimizer.param_groups for p in group["params"]], error)
    return result


def _prepared(optimizer: CompressedOptimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    for key in ("state", "param_groups"):
        if key not in loaded:
            raise ValueError(f"the state_dict has no {key!r}; pass what optimizer.state_dict() returned")
    groups = [dict(group) for group in loaded["param_groups"]]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the state_dict has {len(groups)} parameter groups, the optimizer {len(optimizer.param_groups)}"
        )
    state: dict[Any, dict[str, Any]] = {}
    for g, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _match(group, live, g)
        _fill(optimizer, group, live, g)
        for i, (key, p) in enumerate(zip(group["params"], live["params"], strict=True)):
            entry, name = loaded["state"].get(key), param_name(live, g, i)
            if not isinstance(entry, (dict, type(None))):
                raise ValueError(f"the state of parameter {name} must be a dict, got {type(entry).__name__}")
            if entry:
                state[key] = _checked(optimizer, group, name, p, entry)
            elif p.requires_grad and loaded["state"]:
                warnings.warn(f"the state_dict has no state of parameter {name}; its moments restart", stacklevel=3)
    return {**loaded, "state": state, "param_groups": groups}


def _match(group: Group, live: Group, index: int) -> None:
    """Put ``group["params"]`` in the order of the live parameters: by name where both sides have names."""
    if not isinstance(group["params"], (list, tuple)) or len({*group["params"]}) != len(group["params"]):
        raise ValueError(
            f"params of parameter group {index} of the state_dict must be distinct, got {group['params']!r}"
        )
    saved, current = group.get("param_names"), live.get("param_names")
    if saved is not None and all(isinstance(key, str) for key in group["params"]):
        saved = group["params"]  # torch.distributed.checkpoint orders these as the live group, and not the names
    if saved is not None and current is not None:
        keys = {plain_name(name): key for name, key in zip(saved, group["params"], strict=True)}
        wanted = [plain_name(name) for name in current]
        if set(keys) != set(wanted):
            raise ValueError(
                f"parameter group {index} holds other parameters than the state_dict: "
                f"only in the optimizer {sorted(set(wanted) - set(keys))}, only in the state_dict "
                f"{sorted(set(keys) - set(wanted))}; build the optimizer over the same parameters"
            )
        group["params"] = [keys[name] for name in wanted]
        group["param_names"] = list(current)
    elif len(group["params"]) != len(live["params"]):
        raise ValueError(
            f"parameter group {index} has {len(live['params'])} parameters, the state_dict {len(group['params'])}; "
            "build the optimizer over the same parameters"
        )


def _fill(optimizer: CompressedOptimizer, group: Group, live: Group, index: int) -> None:
    """Fill in options that an older version did not save, check all of them, and warn when a stored form changes."""
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise ValueError(
            f"parameter group {index} of the state_dict couples weight decay into the gradient (Adam), "
            f"{type(optimizer).__name__} decouples it (AdamW); load it into the optimizer that saved it"
        )
    if not {"rule", "nonfinite"} & group.keys() and (odd := _peculiar(optimizer, live)):
        raise ValueError(
            f"parameter group {index} of the state_dict does not say which rule it was saved under, and {odd}; turn it "
            "into this optimizer's with daypack.convert"
        )
    group.setdefault("rule", live.get("rule"))
    foreign = [option for option in _DECAYS if option in group and option not in optimizer.defaults]
    if foreign:
        raise ValueError(
            f"parameter group {index} (from {param_name(live, index, 0)} on) of the state_dict does not belong to "
            f"{type(optimizer).__name__}: it has the option {foreign[0]!r}; load it into the optimizer that saved it"
        )
    for option in optimizer.defaults:
        group.setdefault(option, live[option])
    optimizer.check_options(group, f"parameter group {index} of the state_dict")
    for option in _LIVE & optimizer.defaults.keys():
        group[option] = live[option]
    for option in optimizer.structural:
        if _frozen(group[option]) != _frozen(live[option]):
            warnings.warn(
                f"parameter group {index}: {option}={group[option]!r} comes with the loaded state and replaces "
                f"{live[option]!r}, because the state is stored that way",
                stacklevel=4,
            )


def _peculiar(optimizer: CompressedOptimizer, group: Group) -> str:
    """Say which moment of the optimizer's rule is not a plain mean, so that other rules' state cannot be taken for it;
    empty if none is.
    """
    odd = (moment for moment in optimizer.main_rule(group).moments if moment.meaning.of not in PLAIN_MEANS)
    return next((f"{moment.name} must be a mean of {moment.meaning.of}" for moment in odd), "")


def _frozen(value: Any) -> Any:
    """Return ``value`` with tuples for lists, because a gathered state dict has lists in place of tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def specs_of(param: Tensor, plan: ParamPlan) -> dict[str, ComponentSpec]:
    """Return the state keys of a whole parameter as ``state_dict()`` shows them, except ``step``."""
    return plan.specs(param.shape, param.dtype, saved=True)


def part_of(param: Tensor, plan: ParamPlan, state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of the state of a parameter; empty if it has none."""
    return (
        sharding.LocalState(param, state, specs_of(param, plan)) if state and sharding.is_distributed(param) else state
    )


def shown(param: Tensor, plan: ParamPlan, state: dict[str, Any]) -> dict[str, Any]:
    """Return what ``state_dict()`` shows in another shape than the live state."""
    part, specs, view = part_of(param, plan, state), specs_of(param, plan), sharding.local_view(param, plan)
    changed = {key: value for moment, form in plan.stored for key, value in form.save(part, moment, view).items()}
    return {key: sharding.wrap(param, value, specs[key]) for key, value in changed.items()}


def unpack_(param: Tensor, plan: ParamPlan, state: dict[str, Any]) -> dict[str, Any]:
    """Replace what `prepare` wrapped by copies in their live shape, and return this rank's part of the state."""
    for key, value in state.items():
        if isinstance(value, Keep):
            state[key] = value.copy(param)
    part = part_of(param, plan, state)
    for moment, form in plan.stored:
        form.load_(part, moment, sharding.local_view(param, plan))
    return part


def _checked(optimizer: CompressedOptimizer, group: Group, name: str, param: Tensor, entry: State) -> dict[str, Any]:
    """Return ``entry`` with its tensors wrapped, after checking every key, shape, dtype and value against ``param``."""
    plan = optimizer.plan_of(param, group, name)
    rule, cls = optimizer.main_rule(group).name, type(optimizer).__name__
    if group["rule"] not in (None, rule):
        raise ValueError(
            f"the state of parameter {name} was saved under the rule {group['rule']!r}, {cls} steps by {rule!r}; load "
            "it into the optimizer that saved it"
        )
    specs = {"step": STEP, **specs_of(param, plan)}
    here = {key: sharding.to_local(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
    wrong = validate.misfits({key: spec for key, spec in specs.items() if key != "step"}, entry)
    wrong += [] if "step" in entry else ["step is missing"]
    if wrong := wrong + validate.unknown(specs, entry):
        raise ValueError(
            f"the state of parameter {name} (shape {tuple(param.shape)}) does not fit {cls} with these options: "
            f"{'; '.join(wrong[:3])}; load it into the optimizer that saved it"
        )
    if damaged := validate.damage(validate.parts_of(plan), here, plan.view(param.shape)):
        raise ValueError(f"the state of parameter {name} is damaged: {damaged[0]}; load an undamaged checkpoint")
    step = _step(entry["step"], name)
    if step == 0 and any(here[key].any() for key in specs if key != "step"):
        raise ValueError(f"the state of parameter {name} is damaged: step is 0 though it holds moments")
    return {key: Keep(step if key == "step" else entry[key], spec) for key, spec in specs.items()}


def check_layout(optimizer: CompressedOptimizer, name: str, param: Tensor, plan: ParamPlan, state: State) -> None:
    """Refuse to step state that was laid out for another dtype or other options, which cannot change once it exists."""
    specs = validate.live_specs(plan, sharding.local_view(param, plan), param.dtype)
    if wrong := validate.misfits(specs, state):
        raise ValueError(
            f"the state of parameter {name} is not laid out as its dtype ({param.dtype}) and options say ({wrong[0]}); "
            f"{', '.join(optimizer.structural)} and a change to or from float64 need a new optimizer"
        )


def _step(value: Any, name: str) -> Tensor:
    if not validate.is_count(value):
        raise ValueError(f"step of parameter {name} must be a whole number from 0, got {value!r}")
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")
