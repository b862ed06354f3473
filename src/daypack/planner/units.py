"""Sizes, counts and dtypes as people write them. GB = 1e9 bytes, GiB = 2^30 bytes, everywhere in this room."""

from __future__ import annotations

import re
from math import isfinite

import torch

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_ALIASES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
    "float": "fp32",
    "half": "fp16",
}


def parse_bytes(text: str) -> int:
    """Read the bytes of ``24GB`` (24e9), ``24GiB`` (24 x 2^30) or ``800MB``.

    Raises:
        ValueError: not such a size, or not positive.
    """
    value, unit = _split(text)
    name = unit.removesuffix("b")
    scale = {**_DECIMAL, **_BINARY}.get(name) if unit.endswith("b") else None
    if value is None or scale is None or not 1 <= value * scale < 2**63:
        raise ValueError(f"cannot read the size {text!r}; write it as in 24GB (24e9 bytes) or 24GiB (24 x 2^30)")
    return int(value * scale)


def parse_count(text: str) -> int:
    """Read a number of parameters: ``7B``, ``350M``, ``1.3e9`` or ``7000000``.

    Raises:
        ValueError: not such a number, or not between 1 and 1e15.
    """
    value, unit = _split(text)
    if value is None or unit not in _COUNTS or not 1 <= value * _COUNTS[unit] <= 1e15:
        raise ValueError(f"cannot read the number of parameters {text!r}; write it as in 7B, 350M or 1.3e9")
    return round(value * _COUNTS[unit])


def parse_dtype(text: str) -> torch.dtype:
    """Return the dtype named ``fp32``, ``bf16``, ``fp16``, ``fp64``, or by torch's own name.

    Raises:
        ValueError: no such dtype.
    """
    name = text.strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {text!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``fp32`` and so on; torch's own name for a dtype without a short one."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def show_bytes(size: float) -> str:
    """Format ``size`` bytes in GB (1e9), or in the decimal unit that is easy to read: ``27.0 GB``, ``31.2 MB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            value = size / scale
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return f"{size:.0f} B"


def _split(text: str) -> tuple[float | None, str]:
    match = re.fullmatch(_NUMBER, text.lower())
    if match is None or not isfinite(float(match[1])):
        return None, ""
    return float(match[1]), match[2]
