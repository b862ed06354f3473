"""The parameters of a step that the native kernels take, as a table of pointers: one call for all of them."""

from __future__ import annotations

import ctypes
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration import codebook
from daypack.formats.base import StateFormat
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.line_mean import LineMean, group_count
from daypack.kernels.backend import Mask
from daypack.kernels.layouts import Layouts, Places
from daypack.kernels.native.library import address, loaded, map_tables
from daypack.kernels.native.tables import (
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
    options_of,
    v_block_size,
    v_kind,
)
from daypack.kernels.reference import note_zeros, refresh_basis
from daypack.param import ParamStep

_gradient = attrgetter("grad")


class Batch:
    """See `daypack.kernels.backend.Batch`.

    The table is filled once. `refresh` looks, at each step, whether it still holds, and brings in the new gradients.
    """

    def __init__(self, items: list[ParamStep]) -> None:
        self.items = items
        self.params = [item.param for item in items]
        keys = [(id(item.group), id(item.plan.rule), item.plan.projection is not None) for item in items]
        groups = {key: (item.group, item.plan.rule, key[2]) for key, item in zip(keys, items, strict=True)}
        self.groups = list(groups.values())
        index = {key: i for i, key in enumerate(groups)}
        table = self.table = np.zeros(len(items), PARAM)
        table["options"] = [index[key] for key in keys]
        table["param"] = [p.data_ptr() for p in self.params]
        table["param_type"] = [TYPES[p.dtype] for p in self.params]
        table["grad_type"] = [TYPES[item.grad.dtype] for item in items]
        for name, value in zip(
            ("matrices", "rows", "cols"), zip(*(item.view.view3 for item in items), strict=True), strict=True
        ):
            table[name] = value
        table["first"] = [item.view.origin for item in items]
        table["whole_rows"] = [item.view.whole_rows for item in items]
        table["numel"] = [prod(item.view.whole) for item in items]
        table["v_kind"] = [v_kind(item.plan.format_of("exp_avg_sq")) for item in items]
        for name, moment in (("map", "exp_avg"), ("v_map", "exp_avg_sq")):
            table[name] = [_map_of(item.plan.format_of(moment)) for item in items]
        for i, projection in enumerate(item.plan.projection for item in items):
            if projection:
                table["rank"][i], table["full_rows"][i], table["full_cols"][i] = projection.rank, *projection.shape
        self._projected = [i for i, item in enumerate(items) if item.plan.projection]
        self._set_lines()
        self.squares = np.zeros((len(items), 2), np.float64)
        table["squares"] = self.squares.ctypes.data + 16 * np.arange(len(items), dtype=np.uint64)
        self.item_sizes = np.array([item.grad.element_size() for item in items], np.uint64)
        self.totals = np.zeros(len(items), np.float32)
        self.sums: NDArray[np.float32] = np.zeros(0, np.float32)
        self.attach()
        self._bring_gradients([item.grad.data_ptr() for item in items])

    def _set_lines(self) -> None:
        """Point the table to the group of each line and the groups' sizes, for second moments of groups of lines."""
        self._lines: list[Tensor] = []  # kept, because the table points to them
        for i, item in enumerate(self.items):
            form = item.plan.format_of("exp_avg_sq")
            if isinstance(form, LineMean):
                owners, sizes = form.lines(item.view, torch.device("cpu"))
                self._lines += [owners, sizes]
                self.table["owners"][i], self.table["sizes"][i] = owners.data_ptr(), sizes.data_ptr()
                self.table["groups"][i] = group_count(form.segments)

    def attach(self) -> None:
        """Fill in the state, and what follows from it."""
        table = self.table
        table["v_block_size"] = [v_block_size(item) for item in self.items]
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
        table["block_size"] = [block_size(item) for item in self.items]
        states = [item.state for item in self.items]
        for key, field in FIELDS.items():
            table[field] = [state[key].data_ptr() if key in state else 0 for state in states]
        self._watch()

    def _watch(self) -> None:
        """Note what the table was filled from, for `refresh`."""
        self.states: Any = [item.state for item in self.items]
        self.layouts = Layouts([*(item.grad for item in self.items), *self.params])
        self.pointers = [p.data_ptr() for p in self.params]
        self.places = Places(self._state_values(), loaded())
        sizes = [state[BLOCK_SIZE] for state in self.states if isinstance(state.get(BLOCK_SIZE), Tensor)]
        self.block_sizes = np.array([x.data_ptr() for x in sizes], np.uint64), np.array(list(map(int, sizes)), np.int64)

    def refresh(self) -> bool:
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
        """Put the addresses of the gradients into the table, and return whether all are aligned."""
        self.table["grad"] = pointers
        return not (self.table["grad"] % self.item_sizes).any()

    def observe(self) -> NDArray[np.float64]:
        self._make_room()
        options = self._options()
        loaded().daypack_observe(*self._params(), address(options), torch.get_num_threads(), address(self.totals))
        return self.totals.astype(np.float64)

    def shared_sums(self) -> list[list[Tensor]]:
        ends = [*(self.sum_offsets[1:] // 4).tolist(), self.sum_count]
        found: list[list[Tensor]] = []
        for item, end in zip(self.items, ends, strict=True):
            counts = item.plan.shared_counts(item.view)  # of one second moment at most, and they come last
            found.append([torch.from_numpy(self.sums[end - n : end]) for n in counts if n])
        return found

    def check(self, active: Mask) -> None:
        flags = active.astype(np.uint8)
        self._check(loaded().daypack_check(*self._params(), address(flags), torch.get_num_threads()))

    def measure(self, active: Mask) -> dict[int, Tensor]:
        chosen = [int(i) for i in np.flatnonzero(active) if self.items[i].plan.measures]
        if chosen:
            options, flags = self._options(), active.astype(np.uint8)
            bad = loaded().daypack_measure(*self._params(), address(options), address(flags), torch.get_num_threads())
            self._check(bad)
        return {i: torch.from_numpy(self.squares[i].copy()) for i in chosen}

    def apply(self, active: Mask, squares: dict[int, Tensor], last: bool) -> None:
        for i, part in squares.items():
            self.squares[i] = part.cpu().numpy()
        if self._projected:
            self.check(active)  # before bases change
            for i in self._projected:
                if active[i]:
                    refresh_basis(self.items[i])
        sums = self.sums
        options, flags = self._options(), active.astype(np.uint8)
        marks = None if active.all() else address(flags)
        bad = loaded().daypack_apply(*self._params(), address(options), marks, torch.get_num_threads())
        self._done(bad, active)
        if not last:
            self.sums = sums  # the others' statistics are still wanted

    def step(self) -> Mask:
        if any(self.items[i].state["basis_left"] == 0 for i in self._projected):
            totals = self.observe()
            note_zeros(self.items, totals)
            finite: Mask = np.isfinite(totals)
            self.apply(finite, self.measure(finite), True)
            return finite
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

    def _done(self, bad: int, active: Mask) -> None:
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
                f"the codebook of parameter {self.items[bad].name} is not 256 multiples of 1/{codebook.GRID} that "
                "rise from -1 to 1; nothing was updated; load an undamaged checkpoint"
            )


def _map_of(form: StateFormat | None) -> int:
    """Return the address of the tables of a fixed map; 0 where a moment has none."""
    return map_tables(form.codebook)[1] if isinstance(form, BlockQuantized) and form.codebook != "learned" else 0
