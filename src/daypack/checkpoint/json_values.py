"""Options and numbers as JSON, exactly: a float stays a float, a tuple a tuple, a 0-dim tensor a tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: The dtypes that a file may name, by name.
FILE_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that `name_of` wrote, whatever dtype it is."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r:.40}")
    return dtype


def encode(value: Any, what: str) -> Any:
    """Return ``value`` as JSON; an object with one key stands for what JSON has no type for.

    Raises:
        ValueError: ``value`` is none of a number, bool, string, None, 0-dim tensor, or a list, tuple or dict of these.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor) and value.dim() == 0 and name_of(value.dtype) in FILE_DTYPES:
        return {name_of(value.dtype): encode(value.item(), what)}
    if isinstance(value, list):
        return [encode(each, what) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(each, what) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(each, what) for key, each in value.items()}}
    raise ValueError(f"{what} is a {type(value).__name__} ({value!r:.60}), which a checkpoint file cannot hold")


def decode(value: Any) -> Any:
    """Invert `encode`.

    Raises:
        ValueError: not what `encode` returns.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "tuple" and isinstance(content, list):
            return tuple(map(decode, content))
        if kind == "dict" and isinstance(content, dict):
            return {key: decode(each) for key, each in content.items()}
        if kind in FILE_DTYPES and isinstance(decode(content), (bool, int, float)):
            return torch.tensor(decode(content), dtype=FILE_DTYPES[kind])
    raise ValueError(f"not a value: {value!r:.60}")
