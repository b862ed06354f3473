"""The C++ kernels of ``native/`` through ctypes.

Every function of the library is safe without the interpreter's lock. Where it was not built, `library` is None.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration import maps
from daypack.kernels.native.agreement import differences, parse
from daypack.kernels.native.tables import description

INTERFACE = 6


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None (logged once) where the package was built without a compiler."""
    beside = Path(__file__).parents[1] / ("_native.dll" if sys.platform == "win32" else "_native.so")
    path = os.environ.get("DAYPACK_NATIVE", beside)  # another build of it: `make sanitize`
    try:
        found = ctypes.CDLL(str(path))
        _require_agreement(found)
    except (OSError, AttributeError) as error:
        logging.getLogger("daypack").warning("no native kernels (%s): CPU steps run in torch, which is slower", error)
        return None
    found.daypack_cpu.restype = ctypes.c_char_p
    for name in ("check", "measure", "apply", "step", "codebook", "map_bytes"):
        getattr(found, "daypack_" + name).restype = ctypes.c_int64
    found.daypack_borrow_threads(_openmp())
    return found


def _require_agreement(found: ctypes.CDLL) -> None:
    """Raise OSError if a library was built for other functions, structs or numbers, naming the first that differs."""
    built, remedy = found.daypack_interface(), "it was built from other sources; install the package again"
    if built != INTERFACE:
        raise OSError(f"interface {built} where {INTERFACE} is wanted: {remedy}")
    found.daypack_layout.restype = ctypes.c_char_p
    if different := differences(parse(found.daypack_layout().decode()), description()):
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        raise OSError(f"{different[0]}{more}: {remedy}")


def _openmp() -> ctypes.c_void_p | None:
    """Return ``GOMP_parallel`` of the OpenMP runtime that torch ships and has loaded; None where there is none."""
    loaded_only = getattr(os, "RTLD_NOLOAD", None)
    for path in () if loaded_only is None else sorted(Path(torch.__file__).parent.glob("lib/lib*omp*.so*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path), mode=loaded_only or 0).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def cpu() -> str:
    """Return the instruction set in use: ``avx512``, ``avx2`` or ``portable``. Set by ``DAYPACK_CPU`` or `use_cpu`."""
    return str(loaded().daypack_cpu().decode())


def use_cpu(name: str | None) -> None:
    """Use the kernels for the instruction set ``name``; None: the best one that this machine has. For tests.

    Raises:
        ValueError: this machine cannot run them.
    """
    if loaded().daypack_use_cpu(None if name is None else name.encode()) != 0:
        raise ValueError(f"this machine has no {name} kernels")


def loaded() -> ctypes.CDLL:
    """Return the compiled kernels; raise ValueError where they were not built."""
    found = library()
    if found is None:
        raise ValueError("the native kernels are not built: install the package where a C++ compiler is")
    return found


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Return the address of an array's elements, for the library."""
    return ctypes.c_void_p(array.ctypes.data)


@lru_cache(maxsize=64)
def map_tables(name: str) -> tuple[NDArray[np.uint8], int]:
    """Return the memory that holds the library's tables for the fixed map ``name``, and their aligned address in it."""
    memory = np.zeros(int(loaded().daypack_map_bytes()) + 64, np.uint8)
    place = -(-memory.ctypes.data // 64) * 64
    levels, thresholds = maps.levels(name).numpy(), maps.thresholds(name).numpy()
    if loaded().daypack_prepare_map(address(levels), address(thresholds), ctypes.c_void_p(place)) != 0:
        raise ValueError(f"two thresholds of the map {name!r} agree in their upper 16 bits; space its levels further")
    return memory, place


def is_plain(tensor: Tensor) -> bool:
    """Return whether the elements lie in memory as the kernels read them."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.data_ptr() % tensor.element_size() == 0
    )
