"""Whether tensors are still what they were at the step before, asked of every tensor of an optimizer at every step.

There is a slow way to ask in plain Python, and a fast one through interfaces of torch that are not public: it is tried
first, and given up where a version of torch has none.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Layouts:
    """Python type, device, dtype, shape and strides of each of ``tensors`` (and whether it is a negated view)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._check = _guards(tensors) or _comparison(tensors)

    def hold(self, tensors: Sequence[object]) -> bool:
        """Whether ``tensors`` are as many tensors of the same layouts; anything else among them means no."""
        return len(tensors) == self._count and self._check(*tensors)


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """The check that `torch.compile` makes before it runs compiled code: ten times faster than Python's."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except Exception:
        return None


def _comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    expected = list(map(_layout, tensors))
    return lambda *found: list(map(_layout, found)) == expected


def _layout(tensor: object) -> tuple[Any, ...] | None:
    if not isinstance(tensor, Tensor):
        return None
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return type(tensor), tensor.layout, tensor.device, tensor.dtype, tensor.shape, strides, tensor.is_neg()


class Places:
    """Which tensors ``values`` are, where their elements stand in memory and how they are laid out there."""

    def __init__(self, values: Sequence[object], library: ctypes.CDLL) -> None:
        self._values = list(values)
        self._tensors = [value for value in values if isinstance(value, Tensor)]
        handles = _handles(self._tensors)
        self._look = _looker(handles, library) if handles is not None else lambda: [_place(x) for x in self._tensors]
        self._seen = self._look()
        if handles is not None:
            # Handles are references: torch takes them back as tensors that nobody keeps.
            weakref.finalize(self, torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs, handles).atexit = False

    def hold(self, values: Sequence[object]) -> bool:
        """Whether ``values`` are the same objects, and all that is noted about them still holds."""
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return same and self._look() == self._seen


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), _layout(tensor)


def _handles(tensors: list[Tensor]) -> list[Any] | None:
    """References for torch's C interface, which code compiled apart from torch uses."""
    try:
        return None if _functions() is None else torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    except Exception:
        return None


def _looker(handles: list[Any], library: ctypes.CDLL) -> Callable[[], bytes | None]:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointers = np.array([pointer_of(handle, None) for handle in handles], np.uint64)
    found: NDArray[np.uint64] = np.zeros((2, len(handles)), np.uint64)
    functions = _functions()
    arguments = [ctypes.c_void_p(array.ctypes.data) for array in (functions, pointers, *found)]

    def look() -> bytes | None:
        failed = library.daypack_look(*arguments[:2], ctypes.c_int64(len(pointers)), *arguments[2:])
        return None if failed else found.tobytes()

    return look


@lru_cache(maxsize=1)
def _functions() -> NDArray[np.uint64] | None:
    """A ``DaypackTorch`` of ``native/daypack.h``; None where torch's library lacks one of the functions."""
    names = ("data_ptr", "dtype", "dim", "sizes", "strides")
    try:
        (path,) = Path(torch.__file__).parent.glob("lib/*torch_cpu.*")
        torch_cpu = ctypes.CDLL(str(path))
        addresses = [ctypes.cast(getattr(torch_cpu, "aoti_torch_get_" + name), ctypes.c_void_p).value for name in names]
        return np.array(addresses, np.uint64)
    except (OSError, AttributeError, ValueError):
        return None
