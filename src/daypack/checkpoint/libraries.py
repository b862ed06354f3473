"""Moments as bitsandbytes and torchao store them, decoded when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from daypack.checkpoint import snapshot
from daypack.checkpoint.snapshot import Coded, Stored, Value

#: Where bitsandbytes hides its tensors from FSDP.
_BNB_NEST = "__bnb_optimizer_quant_state__"
#: Its block sizes: of 0.44 and later, and of earlier versions.
_BNB_BLOCKS = (256, 2048)


def entry(raw: Mapping[str, Any]) -> dict[str, Value]:
    """Return the state of one parameter, other libraries' forms of moments replaced by tensors that are decoded when
    read.
    """
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
    if "state1" in flat and isinstance(step := state.get("step"), (int, float)):
        state["step"] = torch.tensor(float(step))
    return state


def _dequantized(value: Any) -> Callable[[int, int], Tensor]:
    """Return a reader that uses torchao's own decoding: 8 bits, 4 bits, fp8."""

    def read(start: int, stop: int) -> Tensor:
        whole: Tensor = value.dequantize(torch.float32)
        return whole.narrow(0, start, stop - start)

    return read


def _torchao(value: Any) -> Coded | None:
    """Return what a tensor of torchao holds: codes (two per byte with 4 bits), a scale per block, and the levels."""
    codes, scale = value.codes, getattr(value, "scale", None)
    if not isinstance(scale, Tensor) or not scale.numel():
        return None
    form = "fp8" if codes.is_floating_point() else "8-bit" if codes.numel() == value.numel() else "4-bit"
    return Coded(form, codes, scale, getattr(value, "qmap", None), value.numel() // scale.numel())


def _bitsandbytes(flat: Mapping[str, Any], index: str) -> Value:
    """Return ``qmap[code] * absmax`` over blocks of 256 elements of the flattened tensor, or fp32 values unchanged.

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
