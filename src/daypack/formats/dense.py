"""A moment stored as it is: one fp32 number per element (fp64 for fp64 parameters), under torch's own state names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daypack.formats.base import ComponentSpec, State, StateFormat
from daypack.geometry import Chunk, Geometry, accumulator, read, write_

#: Short names of the dtypes that moments are kept in as they are.
SHORT_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Dense(StateFormat):
    """4 bytes per element. Used for vectors (norms, biases), where shared statistics would limit the learning rate."""

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        return (ComponentSpec("", view.shape, accumulator(dtype)),)

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        return read(state[name], view, chunk)

    def encode_(self, state: State, name: str, view: Geometry, chunk: Chunk, value: Tensor, step: int) -> None:
        write_(state[name], view, chunk, value)

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        if not state[name].isfinite().all():
            return f"{name} holds a value that is not finite"
        return f"{name} holds a negative value" if squares and (state[name] < 0).any() else None

    def label(self, state: State, name: str) -> str:
        dtype = state[name].dtype
        return SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))
