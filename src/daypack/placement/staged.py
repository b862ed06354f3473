"""Paged state of parameters on an accelerator: pinned host memory, copied in and out beside the computation."""

from __future__ import annotations

import torch
from torch import Tensor

from daypack.formats.base import State
from daypack.placement.base import Placement


class Staged(Placement):
    """State in host memory; a working copy on the device for the time of a parameter's step.

    Copies run on a stream of their own, in the order in which they were asked for, so that the next piece arrives
    while the present one is stepped. On a CPU (for tests) the same copies are made at once.

    Attributes:
        device: the parameters' device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self._cuda)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and (tensor.is_pinned() or not self._cuda or not tensor.numel())

    def fetch(self, state: State) -> State:
        with torch.cuda.stream(self._side):  # no effect for None
            return {key: self._copy(value) if _moves(value) else value for key, value in state.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True, copy=True)

    def ready(self, working: State) -> State:
        if self._side is not None:
            present = torch.cuda.current_stream(self.device)
            present.wait_stream(self._side)
            for value in filter(_moves, working.values()):
                value.record_stream(present)  # its memory is not given away before the present stream is done with it
        return working

    def release(self, state: State, working: State) -> None:
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            for key, value in working.items():
                if _moves(value):
                    state[key].copy_(value, non_blocking=True)

    def wait(self) -> None:
        if self._side is not None:
            self._side.synchronize()


def _moves(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
