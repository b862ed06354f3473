"""Checks, at every step and for every tensor of an optimizer, that tensors are the same as at the step before.

A fast check uses interfaces of torch that are not public; where a version of torch lacks them, a slow check in plain
Python is used.
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
from torch import Tensor


class Layouts:
    """Python type, device, dtype, shape and strides of each of ``tensors`` (and whether it is a negated view)."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._check = _guards(tensors) or _comparison(tensors)

    def hold(self, tensors: Sequence[object]) -> bool:
        """Return whether ``tensors`` are as many tensors with the same layouts; False if any of them is no tensor."""
        return len(tensors) == self._count and self._check(*tensors)


def _guards(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return the check that `torch.compile` makes before it runs compiled code: ten times faster than Python's."""
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
    """Which objects ``values`` are, and where in memory those that are tensors have their elements."""

    def __init__(self, values: Sequence[object], library: ctypes.CDLL) -> None:
        self._values = list(values)
        tensors = [value for value in values if isinstance(value, Tensor)]
        handles = _handles(tensors)
        self._look = _looker(handles, library) if handles is not None else lambda: [x.data_ptr() for x in tensors]
        self._seen = self._look()
        if handles is not None:
            # Handles own references. To free them, torch turns them back into tensors, which are dropped at once.
            weakref.finalize(self, torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs, handles).atexit = False

    def hold(self, values: Sequence[object]) -> bool:
        """Return whether ``values`` are the same objects, with their elements in the same places."""
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return same and self._look() == self._seen


def _handles(tensors: list[Tensor]) -> list[Any] | None:
    """Return references to the tensors for torch's C interface, which code compiled apart from torch uses."""
    try:
        return None if _data_ptr() is None else torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    except Exception:
        return None


def _looker(handles: list[Any], library: ctypes.CDLL) -> Callable[[], bytes | None]:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointers = np.array([pointer_of(handle, None) for handle in handles], np.uint64)
    places = np.zeros(len(handles), np.uint64)
    tensors, found = ctypes.c_void_p(pointers.ctypes.data), ctypes.c_void_p(places.ctypes.data)

    def look() -> bytes | None:
        count = ctypes.c_int64(len(pointers))
        failed = library.daypack_look(_data_ptr(), tensors, count, torch.get_num_threads(), found)
        return None if failed else places.tobytes()

    return look


@lru_cache(maxsize=1)
def _data_ptr() -> ctypes.c_void_p | None:
    """Return torch's C function that finds a tensor's elements; None where its library lacks it."""
    try:
        (path,) = Path(torch.__file__).parent.glob("lib/*torch_cpu.*")
        return ctypes.cast(ctypes.CDLL(str(path)).aoti_torch_get_data_ptr, ctypes.c_void_p)
    except (OSError, AttributeError, ValueError):
        return None
