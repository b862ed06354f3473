"""Checks of options, parameters and gradients. Every refusal is one ValueError that names the value and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from daypack.placement.schedule import PLACEMENTS
from daypack.sharding import refusal

Group = dict[str, Any]

PARAM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Arguments of `torch.optim.AdamW` that are accepted for its signature and refused when True.
UNSUPPORTED = ("amsgrad", "capturable", "differentiable")
LARGEST_BLOCK_SIZE = 1 << 20


def arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options among a constructor's ``locals()``, taken before anything else: all but the parameters."""
    return {key: value for key, value in values.items() if key not in ("self", "params", "__class__")}


def number(value: Any, option: str, where: str) -> float:
    """Return ``value`` as a float; a 0-dim tensor or a numpy number is a number, a string or a bool is not."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{option} of {where} must be a number, got {value!r} ({type(value).__name__})")
    if not isfinite(value):
        raise ValueError(f"{option} of {where} must be finite, got {value!r}")
    return float(value)


def check_adamw(group: Group, where: str) -> None:
    """Check AdamW's own options in ``group``.

    Raises:
        ValueError: an option is missing, is of the wrong type or out of range, or is not supported.
    """
    check_common(group, where)
    check_not_negative(group, ("eps",), where)
    check_betas(group, where)


def check_common(group: Group, where: str) -> None:
    """Check what every optimizer of ours has: learning rate, decay, ``maximize``, kernel, gradients, placement.

    Raises:
        ValueError: an option is missing, is of the wrong type or out of range, or is not supported.
    """
    check_not_negative(group, ("lr", "weight_decay"), where)
    check_flags(group, ("maximize", *(option for option in UNSUPPORTED if option in group)), where)
    for option in ("foreach", "fused"):
        value = _get(group, option, where)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{option} of {where} must be None, True or False, got {value!r}")
    check_choice(group, "nonfinite", ("skip", "raise"), where)
    check_choice(group, "placement", PLACEMENTS, where)
    if not isinstance(_get(group, "spill_dir", where), (str, type(None))):
        raise ValueError(f"spill_dir of {where} must be a path as a string, or None, got {group['spill_dir']!r}")


def check_number(group: Group, option: str, where: str) -> float:
    return number(_get(group, option, where), option, where)


def check_not_negative(group: Group, options: Sequence[str], where: str) -> None:
    for option in options:
        if check_number(group, option, where) < 0:
            raise ValueError(f"{option} of {where} must not be negative, got {group[option]!r}")


def check_betas(group: Group, where: str, count: int = 2) -> None:
    """Check that ``betas`` are ``count`` numbers in [0, 1)."""
    betas, words = _get(group, "betas", where), {2: "two", 3: "three"}
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != count:
        raise ValueError(f"betas of {where} must be {words[count]} numbers in [0, 1), got {betas!r}")
    for beta in betas:
        if not 0 <= number(beta, "betas", where) < 1:
            raise ValueError(f"betas of {where} must lie in [0, 1), got {betas!r}")


def check_flags(group: Group, flags: Sequence[str], where: str) -> None:
    """Check that ``flags`` are True or False, and that those of `UNSUPPORTED` are False."""
    for option in flags:
        value = _get(group, option, where)
        if not isinstance(value, bool):
            raise ValueError(f"{option} of {where} must be True or False, got {value!r}")
        if value and option in UNSUPPORTED:
            raise ValueError(f"{option}=True of {where} is not supported; leave it False or use torch's own optimizer")


def check_choice(group: Group, option: str, choices: Sequence[Any], where: str) -> None:
    value = _get(group, option, where)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{option} of {where} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_positive(group: Group, option: str, where: str) -> None:
    value = _get(group, option, where)
    if type(value) is not int or value < 1:
        raise ValueError(f"{option} of {where} must be a positive whole number, got {value!r}")


def check_initialized(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters and buffers of lazy modules that have no shape yet.

    Raises:
        ValueError: names all of them.
    """
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"{', '.join(lazy)} of lazy modules have no shape yet; pass one batch through the model first")


def check_spill_dir(group: Group, where: str) -> None:
    """Check that paged state has a directory where files can be created, if one is named."""
    path = group["spill_dir"]
    if group["placement"] == "paged" and path is not None and not (os.path.isdir(path) and os.access(path, os.W_OK)):
        raise ValueError(f"spill_dir of {where} is no directory that can be written to: {path!r}; create it first")


def check_block_size(group: Group, where: str) -> None:
    """Check that ``block_size`` is a positive whole number, at most `LARGEST_BLOCK_SIZE`."""
    check_positive(group, "block_size", where)
    if group["block_size"] > LARGEST_BLOCK_SIZE:
        raise ValueError(
            f"block_size of {where} must be at most {LARGEST_BLOCK_SIZE:,}, got {group['block_size']:,}; no block is "
            "longer than a row"
        )


def check_param(param: Tensor, name: str) -> None:
    """Refuse a trainable parameter that no format can hold. Frozen ones of any dtype (quantised bases) pass."""
    check_initialized([(name, param)])
    if param.requires_grad and param.dtype not in PARAM_DTYPES:
        raise ValueError(
            f"parameter {name} has dtype {param.dtype}, which is not supported: "
            + ("optimize torch.view_as_real of it" if param.is_complex() else "convert it to bfloat16 or float32")
        )
    refused = refusal(param)
    if refused:
        raise ValueError(f"parameter {name} {refused}")


def check_gradient(param: Tensor, grad: Tensor, name: str) -> None:
    """Refuse a gradient that cannot be applied to ``param``."""
    check_param(param, name)
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is sparse ({grad.layout}); build its module with sparse=False")
    if not grad.is_floating_point():
        raise ValueError(f"the gradient of {name} has dtype {grad.dtype}; it must be a real floating-point type")
    if grad.shape != param.shape:
        raise ValueError(f"the gradient of {name} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}")
    if grad.device != param.device:
        raise ValueError(f"the gradient of {name} is on {grad.device}, its parameter on {param.device}; move one")


def param_name(group: Group, group_index: int, index: int) -> str:
    """Return the parameter's name if the group has names, else its position; for messages only."""
    names = group.get("param_names")
    if names is not None and index < len(names):
        return str(names[index])
    return f"{index} of group {group_index}"


def plain_name(name: str) -> str:
    """Return a name without what wrappers (DDP, torch.compile, FSDP) add to it."""
    return name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def unmatched(pattern: str, names: Iterable[str], what: str) -> ValueError:
    """Return the error for a pattern that matches no name, with the names that are most like it."""
    every = list(names)
    near = get_close_matches(pattern, every, 3, 0.3) or every[:3]
    return ValueError(f"{what} {pattern!r} matches no parameter; names like it are {', '.join(near) or 'none'}")


def check_patterns(patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    """Refuse a pattern, as in `fnmatch`, that matches none of ``names``."""
    every = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise unmatched(pattern, every, what)


def _get(group: Group, option: str, where: str) -> Any:
    if option not in group:
        raise ValueError(f"{where} has no option {option!r}")
    return group[option]
