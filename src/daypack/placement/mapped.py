"""Paged state on a CPU: memory-mapped files, so that state larger than the memory still trains."""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from daypack.formats.base import State
from daypack.placement.base import Placement, is_mapped

#: Tensors below a page stay in memory: paging them would save nothing.
SMALLEST = 4096
#: `madvise`'s, the same on Linux, macOS and the BSDs.
_WILLNEED, _DONTNEED = 3, 4


class Mapped(Placement):
    """Each tensor in a file of its own. The file is deleted while open, so nothing stays behind when the process ends.

    Disk space is reserved when the file is made. While a parameter is not being stepped, the system may write its pages
    out when it needs the memory: `release` gives them up, `fetch` reads ahead.

    Attributes:
        directory: of the files; None for the system's temporary one. A directory in memory (tmpfs) saves nothing.
    """

    def __init__(self, directory: str | None) -> None:
        if os.name != "posix":
            raise ValueError("placement='paged' on a CPU needs POSIX memory maps; leave it 'resident' on this system")
        self.directory = directory

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < SMALLEST:
            return torch.zeros(shape, dtype=dtype)
        try:
            fd, path = tempfile.mkstemp(prefix="daypack-", dir=self.directory)
        except OSError as error:
            raise ValueError(f"spill_dir={self.directory!r} cannot hold paged state: {error}") from error
        try:
            _reserve(fd, nbytes)
            storage = torch.UntypedStorage.from_file(path, True, nbytes)
        except OSError as error:
            raise ValueError(
                f"no room for {nbytes:,} bytes of paged state in {os.path.dirname(path)} ({error}); choose a spill_dir"
            ) from error
        finally:
            os.close(fd)
            os.unlink(path)
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]

    def holds(self, tensor: Tensor) -> bool:
        return is_mapped(tensor) or (tensor.device.type == "cpu" and tensor.nbytes < SMALLEST)

    def fetch(self, state: State) -> State:
        _advise(state, _WILLNEED)
        return state

    def release(self, state: State, working: State) -> None:
        _advise(state, _DONTNEED)


def _reserve(fd: int, nbytes: int) -> None:
    """Make the file ``nbytes`` long and reserve the disk space where the system can, so that a full disk is an error
    now and not a signal in the middle of a step.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:  # macOS
        os.ftruncate(fd, nbytes)


def _advise(state: State, advice: int) -> None:
    """Tell the system how the pages of every mapped tensor will be used. This is advice and changes no value."""
    for value in state.values():
        if isinstance(value, Tensor) and is_mapped(value):
            storage = value.untyped_storage()
            _libc().madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), advice)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
