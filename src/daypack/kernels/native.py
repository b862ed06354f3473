"""The C++ kernels of ``native/`` through ctypes: one call for all parameters of a step, with a table of their pointers.

Every function of the library is safe without the interpreter's lock. Where it was not built, `library` is None.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import lru_cache
from itertools import chain
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration import codebook, maps
from daypack.formats.base import StateFormat
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.line_mean import LineMean, group_count
from daypack.kernels.agreement import differences, parse
from daypack.kernels.layouts import Layouts, Places
from daypack.kernels.tables import (
    BLOCK_SIZE,
    BLOCKS,
    COLS,
    FACTORED,
    FIELDS,
    NO_MEMORY,
    OPTIONS,
    PARAM,
    ROWS,
    TYPES,
    block_size,
    layout,
    options_of,
    refusal_of_formats,
    v_block_size,
    v_kind,
)
from daypack.update import Update

INTERFACE = 6

_gradient = attrgetter("grad")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, said once in the log, where the package was built without a compiler."""
    beside = Path(__file__).with_name("_native.dll" if sys.platform == "win32" else "_native.so")
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
    """OSError if a library was built for other functions, structs or numbers; it names the first that differs."""
    built, remedy = found.daypack_interface(), "it was built from other sources; install the package again"
    if built != INTERFACE:
        raise OSError(f"interface {built} where {INTERFACE} is wanted: {remedy}")
    found.daypack_layout.restype = ctypes.c_char_p
    if different := differences(parse(found.daypack_layout().decode()), layout()):
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        raise OSError(f"{different[0]}{more}: {remedy}")


def _openmp() -> ctypes.c_void_p | None:
    """``GOMP_parallel`` of the OpenMP runtime that torch brought along and loaded; None where there is none."""
    loaded_only = getattr(os, "RTLD_NOLOAD", None)
    for path in () if loaded_only is None else sorted(Path(torch.__file__).parent.glob("lib/lib*omp*.so*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path), mode=loaded_only or 0).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def cpu() -> str:
    """The instruction set in use: ``avx512``, ``avx2`` or ``portable``. Set by ``DAYPACK_CPU`` or `use_cpu`."""
    return str(loaded().daypack_cpu().decode())


def use_cpu(name: str | None) -> None:
    """Use the kernels for the instruction set ``name``; None: the best one that this machine has. For tests.

    Raises:
        ValueError: this machine cannot run them.
    """
    if loaded().daypack_use_cpu(None if name is None else name.encode()) != 0:
        raise ValueError(f"this machine has no {name} kernels")


def loaded() -> ctypes.CDLL:
    """The compiled kernels; a ValueError where they were not built."""
    found = library()
    if found is None:
        raise ValueError("the native kernels are not built: install the package where a C++ compiler is")
    return found


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Where an array's elements stand, for the library."""
    return ctypes.c_void_p(array.ctypes.data)


def refusal(update: Update) -> str | None:
    """Why the native kernels cannot take ``update``; None if they can."""
    p, plan = update.param, update.plan
    if p.device.type != "cpu":
        return f"no native kernel on {p.device}"
    if library() is None:
        return "the native kernels are not built"
    if refused := refusal_of_formats(plan):
        return refused
    if p.dtype not in TYPES or update.grad.dtype not in TYPES:
        return f"no native kernel for {p.dtype} parameters with {update.grad.dtype} gradients"
    tensors = [p, update.grad, *(value for value in update.state.values() if isinstance(value, Tensor))]
    if not all(map(is_plain, tensors)):
        return "a tensor is not contiguous, not aligned, or not an ordinary CPU tensor"
    return None


@lru_cache(maxsize=64)
def _map(name: str) -> tuple[NDArray[np.uint8], int]:
    """The library's tables for the fixed map ``name``, and their aligned address within."""
    memory = np.zeros(int(loaded().daypack_map_bytes()) + 64, np.uint8)
    place = -(-memory.ctypes.data // 64) * 64
    levels, thresholds = maps.levels(name).numpy(), maps.thresholds(name).numpy()
    if loaded().daypack_prepare_map(address(levels), address(thresholds), ctypes.c_void_p(place)) != 0:
        raise ValueError(f"two thresholds of the map {name!r} agree in their upper 16 bits; space its levels further")
    return memory, place


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements stand in memory as the kernels read them."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.data_ptr() % tensor.element_size() == 0
    )


class Batch:
    """The updates of a step that the native kernels take, as a table of pointers.

    The table is filled once. `refresh` looks, at each step, whether it still holds, and brings in the new gradients.
    """

    def __init__(self, updates: list[Update]) -> None:
        self.updates = updates
        self.params = [update.param for update in updates]
        keys = [(id(update.group), update.plan.projection is not None) for update in updates]
        rules = {key: (u.group, u.plan.rule, key[1]) for key, u in zip(keys, updates, strict=True)}
        self.groups = list(rules.values())
        index = {key: i for i, key in enumerate(rules)}
        table = self.table = np.zeros(len(updates), PARAM)
        table["options"] = [index[key] for key in keys]
        table["param"] = [p.data_ptr() for p in self.params]
        table["param_type"] = [TYPES[p.dtype] for p in self.params]
        table["grad_type"] = [TYPES[update.grad.dtype] for update in updates]
        for name, value in zip(
            ("matrices", "rows", "cols"), zip(*(u.view.view3 for u in updates), strict=True), strict=True
        ):
            table[name] = value
        table["first"] = [update.view.origin for update in updates]
        table["whole_rows"] = [update.view.whole_rows for update in updates]
        table["numel"] = [prod(update.view.whole) for update in updates]
        table["v_kind"] = [v_kind(update.plan.exp_avg_sq) for update in updates]
        for name, moment in (("map", "exp_avg"), ("v_map", "exp_avg_sq")):
            table[name] = [_map_of(getattr(update.plan, moment)) for update in updates]
        for i, projection in enumerate(update.plan.projection for update in updates):
            if projection:
                table["rank"][i], table["full_rows"][i], table["full_cols"][i] = projection.rank, *projection.shape
        self._set_lines()
        self.squares = np.zeros((len(updates), 2), np.float64)
        table["squares"] = self.squares.ctypes.data + 16 * np.arange(len(updates), dtype=np.uint64)
        self.item_sizes = np.array([update.grad.element_size() for update in updates], np.uint64)
        self.totals = np.zeros(len(updates), np.float32)
        self.sums: NDArray[np.float32] = np.zeros(0, np.float32)
        self.attach()
        self._bring_gradients([update.grad.data_ptr() for update in updates])

    def _set_lines(self) -> None:
        """Where second moments belong to groups of lines: which, and how large they are."""
        self._lines: list[Tensor] = []  # kept, because the table points to them
        for i, update in enumerate(self.updates):
            form = update.plan.exp_avg_sq
            if isinstance(form, LineMean):
                owners, sizes = form.lines(update.view, torch.device("cpu"))
                self._lines += [owners, sizes]
                self.table["owners"][i], self.table["sizes"][i] = owners.data_ptr(), sizes.data_ptr()
                self.table["groups"][i] = group_count(form.segments)

    def attach(self) -> None:
        """Fill in the state, which may not exist yet, and what follows from it."""
        table = self.table
        table["v_block_size"] = [v_block_size(update) for update in self.updates]
        rows, cols, kinds = table["rows"], table["cols"], table["v_kind"]
        blocks = rows * -(-cols // np.maximum(table["v_block_size"], 1))
        counts = np.select(
            [kinds == FACTORED, kinds == BLOCKS, kinds == ROWS, kinds == COLS],
            [rows + cols, blocks, rows + table["groups"], rows + cols + table["groups"]],
            0,
        )
        counts *= table["matrices"]
        self.sum_offsets = ((np.cumsum(counts) - counts) * 4).astype(np.uint64)
        self.sum_count = int(counts.sum())
        table["block_size"] = [block_size(update) for update in self.updates]
        states = [update.state for update in self.updates]
        for key, field in FIELDS.items():
            table[field] = [state[key].data_ptr() if key in state else 0 for state in states]
        self._watch()

    def _watch(self) -> None:
        """Note what the table was filled from, for `refresh`."""
        self.states: Any = [update.state for update in self.updates]
        self.layouts = Layouts([*(update.grad for update in self.updates), *self.params])
        self.pointers = [p.data_ptr() for p in self.params]
        self.places = Places(self._state_values(), loaded())
        sizes = [state[BLOCK_SIZE] for state in self.states if isinstance(state.get(BLOCK_SIZE), Tensor)]
        self.block_sizes = np.array([x.data_ptr() for x in sizes], np.uint64), np.array(list(map(int, sizes)), np.int64)

    def refresh(self) -> bool:
        """Take in this step's gradients. False if the table does not fit any more: then build another one."""
        ours = [*map(_gradient, self.params), *self.params]
        if not self.layouts.hold(ours):
            return False
        # Tensors of the same layout in the same place are the same to the kernels.
        pointers = list(map(Tensor.data_ptr, ours))
        count = len(self.params)
        if pointers[count:] != self.pointers or not self.places.hold(self._state_values()):
            return False
        return self._same_block_sizes() and self._bring_gradients(pointers[:count])

    def _state_values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.states)))

    def _same_block_sizes(self) -> bool:
        places, numbers = self.block_sizes
        count = ctypes.c_int64(len(places))
        return not len(places) or bool(loaded().daypack_numbers_are(address(places), address(numbers), count))

    def _bring_gradients(self, pointers: list[int]) -> bool:
        """False if one is not aligned."""
        self.table["grad"] = pointers
        return not (self.table["grad"] % self.item_sizes).any()

    def observe(self) -> NDArray[np.float32]:
        """First pass over the gradients; the sum of the squares of each."""
        self._make_room()
        options = self._options()
        loaded().daypack_observe(*self._params(), address(options), torch.get_num_threads(), address(self.totals))
        return self.totals

    def check(self, active: NDArray[np.bool_]) -> None:
        """Raise ValueError if a codebook of the updates marked by ``active`` is not usable, as `apply` would."""
        flags = active.astype(np.uint8)
        self._check(loaded().daypack_check(*self._params(), address(flags), torch.get_num_threads()))

    def measure(self, active: NDArray[np.bool_]) -> dict[int, Tensor]:
        """Squares that the rules of updates marked by ``active`` measure, by index; views of what `apply` reads."""
        chosen = [int(i) for i in np.flatnonzero(active) if self.updates[i].plan.measures]
        if chosen:
            options, flags = self._options(), active.astype(np.uint8)
            bad = loaded().daypack_measure(*self._params(), address(options), address(flags), torch.get_num_threads())
            self._check(bad)
        return {i: torch.from_numpy(self.squares[i]) for i in chosen}

    def shared_sums(self, index: int) -> Tensor | None:
        """What of an update's statistics belongs to all ranks, a view to be added up in place; None if nothing does."""
        update = self.updates[index]
        form = update.plan.exp_avg_sq
        count = form.shared(update.view) if form else 0
        if not count:
            return None
        end = int(self.sum_offsets[index + 1]) // 4 if index + 1 < len(self.updates) else self.sum_count
        return torch.from_numpy(self.sums[end - count : end])  # they come last

    def apply(self, active: NDArray[np.bool_], last: bool = True) -> None:
        """Second pass over the parameters that ``active`` marks. Counts their steps. ``last``: no more will follow."""
        sums = self.sums
        options, flags = self._options(), active.astype(np.uint8)
        marks = None if active.all() else address(flags)
        bad = loaded().daypack_apply(*self._params(), address(options), marks, torch.get_num_threads())
        self._done(bad, active)
        if not last:
            self.sums = sums  # the others' statistics are still wanted

    def step(self) -> NDArray[np.bool_]:
        """Both passes at once, over all gradients that are finite; which ones are."""
        self._make_room()
        options = self._options()
        bad = loaded().daypack_step(*self._params(), address(options), torch.get_num_threads(), address(self.totals))
        finite = np.isfinite(self.totals)
        self._done(bad, finite)
        return finite

    def _params(self) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
        return address(self.table), ctypes.c_int64(len(self.table))

    def _options(self) -> NDArray[Any]:
        return np.array([options_of(*entry) for entry in self.groups], OPTIONS)

    def _make_room(self) -> None:
        self.sums = np.zeros(self.sum_count, np.float32)  # a rank's part may be empty
        self.table["sums"] = self.sum_offsets + np.uint64(self.sums.ctypes.data)

    def _done(self, bad: int, active: NDArray[np.bool_]) -> None:
        self.sums = np.zeros(0, np.float32)
        self._check(bad)
        # Autograd must notice that values it saved for a backward pass are not there any more.
        stepped = self.params if active.all() else [self.params[i] for i in np.flatnonzero(active)]
        torch.autograd.graph.increment_version(stepped)

    def _check(self, bad: int) -> None:
        if bad == NO_MEMORY:
            raise MemoryError(
                "no memory for the stand-ins of projected parameters; nothing was updated; take a lower rank or fewer "
                "threads"
            )
        if bad >= 0:
            raise ValueError(
                f"the codebook of parameter {self.updates[bad].name} is not 256 multiples of 1/{codebook.GRID} that "
                "rise from -1 to 1; nothing was updated; load an undamaged checkpoint"
            )


def _map_of(form: StateFormat | None) -> int:
    """Address of the tables of a fixed map; 0 where a moment has none."""
    return _map(form.codebook)[1] if isinstance(form, BlockQuantized) and form.codebook != "learned" else 0
