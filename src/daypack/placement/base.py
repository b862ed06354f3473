"""What all placements share, and the placement that changes nothing."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from daypack.formats.base import State


class Placement:
    """Where the state tensors of parameters on one device are kept. Step counters and other scalars stay as they are.

    Kernels read and write plain tensors and know nothing of placements. `fetch` begins to bring a parameter's state
    within their reach, `ready` returns it once it is there, `release` begins to bring it back.
    """

    #: Whether state must be fetched and released, so that a step goes through it piece by piece.
    away: ClassVar[bool] = True

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros in its place."""
        raise NotImplementedError

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in its place."""
        raise NotImplementedError

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if it is in its place, else a copy that is."""
        if tensor.dim() == 0 or self.holds(tensor):
            return tensor
        return self.zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())

    def adopt_(self, state: State) -> None:
        """Call `adopt` for every tensor of one parameter's state."""
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = self.adopt(value)

    def fetch(self, state: State) -> State:
        """Begin to bring the state in, and return what `ready` and `release` are to be given."""
        return state

    def ready(self, working: State) -> State:
        """Return the state to step with, once it is there."""
        return working

    def release(self, state: State, working: State) -> None:
        """Begin to bring ``working``, which was stepped, back to ``state``."""

    def wait(self) -> None:
        """Return once no copy is under way any more."""


class Resident(Placement):
    """State on the parameter's device."""

    away = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and not is_mapped(tensor)


def is_mapped(tensor: Tensor) -> bool:
    """Return whether ``tensor`` lies in a file that is mapped into memory."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None
