"""The C++ kernels of ``native/`` through ctypes: one call for all parameters of a step, with a table of their pointers.

Every function of the library is safe without the interpreter's lock. Where it was not built, `library` is None.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration import codebook
from daypack.calibration.blocks import block_size_from_scores, candidates, default_block_size
from daypack.formats.base import Geometry
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.formats.factored import Factored
from daypack.rules import ADAMW
from daypack.update import Update

INTERFACE = 1
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Scales of larger blocks are left to the reference: a block's fresh moments wait in a buffer of fixed size.
LARGEST_BLOCK = 4096

# The structs of native/daypack.h.
_POINTERS = ["param", "grad", "step", "codes", "scale", "codebook", "exp_avg", "exp_avg_sq"]
_POINTERS += ["row", "col", "block", "sums"]
_NUMBERS = ["matrices", "rows", "cols", "block_size", "v_block_size", "v_kind", "param_type", "grad_type", "options"]
PARAM = np.dtype([(name, np.uint64) for name in _POINTERS] + [(name, np.int64) for name in _NUMBERS])
OPTIONS = np.dtype([(name, np.float64) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "sign")])
_V_KINDS: dict[type, int] = {Dense: 0, Factored: 1, BlockMean: 2}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, said once in the log, where the package was built without a compiler."""
    beside = Path(__file__).with_name("_native.dll" if sys.platform == "win32" else "_native.so")
    path = os.environ.get("DAYPACK_NATIVE", beside)  # another build of it: `make sanitize`
    try:
        found = ctypes.CDLL(str(path))
        if found.daypack_interface() != INTERFACE or found.daypack_param_bytes() != PARAM.itemsize:
            raise OSError("it was built from other sources; install the package again")
    except OSError as error:
        logging.getLogger("daypack").warning("no native kernels (%s): CPU steps run in torch, which is slower", error)
        return None
    found.daypack_cpu.restype = ctypes.c_char_p
    for name in ("observe", "apply", "step", "codebook"):
        getattr(found, "daypack_" + name).restype = ctypes.c_int64
    found.daypack_borrow_threads(_openmp())
    return found


def _openmp() -> ctypes.c_void_p | None:
    """``GOMP_parallel`` of the OpenMP runtime that torch brought along and loaded; None where there is none."""
    loaded_only = getattr(os, "RTLD_NOLOAD", None)
    if loaded_only is None:
        return None
    for path in sorted(Path(torch.__file__).parent.glob("lib/lib*omp*.so*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path), mode=loaded_only).GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def cpu() -> str:
    """The instruction set in use: ``avx512``, ``avx2`` or ``portable``. Set by ``DAYPACK_CPU`` or `use_cpu`."""
    return str(_library().daypack_cpu().decode())


def use_cpu(name: str | None) -> None:
    """Use the kernels for the instruction set ``name``; None: the best one that this machine has. For tests.

    Raises:
        ValueError: this machine cannot run them.
    """
    if _library().daypack_use_cpu(None if name is None else name.encode()) != 0:
        raise ValueError(f"this machine has no {name} kernels")


def _library() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise ValueError("the native kernels are not built: install the package where a C++ compiler is")
    return found


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def refusal(update: Update) -> str | None:
    """Why the native kernels cannot take ``update``; None if they can."""
    p, plan = update.param, update.plan
    if p.device.type != "cpu":
        return f"no native kernel on {p.device}"
    if library() is None:
        return "the native kernels are not built"
    m, v = plan.exp_avg, plan.exp_avg_sq
    if plan.rule is not ADAMW or type(v) not in _V_KINDS or type(m) not in (Dense, BlockQuantized):
        return "no native kernel for these formats"
    if isinstance(m, BlockQuantized) and (m.rounding != "dithered" or m.block_size > LARGEST_BLOCK):
        return f"no native kernel for blocks over {LARGEST_BLOCK} elements or other rounding than dithered"
    if update.view.sharded:
        return "no native kernel for a part of a parameter"
    if p.dtype not in TYPES or update.grad.dtype not in TYPES:
        return f"no native kernel for {p.dtype} parameters with {update.grad.dtype} gradients"
    tensors = [p, update.grad, *(value for value in update.state.values() if isinstance(value, Tensor))]
    if not all(map(_is_plain, tensors)):
        return "a tensor is not contiguous, not aligned, or not an ordinary CPU tensor"
    return None


_is_here = attrgetter("is_cpu")


def _is_plain(tensor: Tensor) -> bool:
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
        self.groups = list({id(update.group): update.group for update in updates}.values())
        index = {id(group): i for i, group in enumerate(self.groups)}
        self.shapes = [p.shape for p in self.params]
        self.grad_dtypes = [update.grad.dtype for update in updates]
        table = self.table = np.zeros(len(updates), PARAM)
        table["options"] = [index[id(update.group)] for update in updates]
        table["param"] = self.pointers = [p.data_ptr() for p in self.params]
        table["param_type"] = [TYPES[p.dtype] for p in self.params]
        table["grad_type"] = [TYPES[dtype] for dtype in self.grad_dtypes]
        for name, value in zip(
            ("matrices", "rows", "cols"), zip(*(u.view.view3 for u in updates), strict=True), strict=True
        ):
            table[name] = value
        table["v_kind"] = [_V_KINDS[type(update.plan.exp_avg_sq)] for update in updates]
        self.item_sizes = np.array([dtype.itemsize for dtype in self.grad_dtypes], np.uint64)
        self.totals = np.zeros(len(updates), np.float32)
        self.sums: NDArray[np.float32] = np.zeros(0, np.float32)
        self.attach()
        self._bring_gradients([update.grad for update in updates])

    def attach(self) -> None:
        """Fill in the state, which may not exist yet, and what follows from it."""
        table, states = self.table, [update.state for update in self.updates]
        self.block_sizes = [_v_block_size(update) for update in self.updates]
        table["v_block_size"] = self.block_sizes
        counts = np.select(
            [table["v_kind"] == 1, table["v_kind"] == 2],
            [table["rows"] + table["cols"], table["rows"] * -(-table["cols"] // np.maximum(table["v_block_size"], 1))],
            0,
        )
        counts *= table["matrices"]
        self.sum_offsets = ((np.cumsum(counts) - counts) * 4).astype(np.uint64)
        self.sum_count = int(counts.sum())
        self.states: Any = states
        self.identities = _identities(states)
        self.watched: list[tuple[itemgetter[Any], list[dict[str, Any]], list[int]]] = []
        keys = [tuple(key for key in _FIELDS if key in state) for state in states]
        for cell in dict.fromkeys(keys):
            rows = [i for i, each in enumerate(keys) if each == cell]
            mine: Any = [states[i] for i in rows]
            for key in cell:
                table[_FIELDS[key]][rows] = pointers = _pointers(itemgetter(key), mine)
                if key in _WATCHED:
                    self.watched.append((itemgetter(key), mine, pointers))
        coded = [isinstance(update.plan.exp_avg, BlockQuantized) for update in self.updates]
        table["block_size"] = [
            max(1, min(getattr(u.plan.exp_avg, "block_size", 1), u.view.cols)) if code else 1
            for u, code in zip(self.updates, coded, strict=True)
        ]

    def refresh(self) -> bool:
        """Take in this step's gradients. False if the table does not fit any more: then build another one."""
        grads: Any = [p.grad for p in self.params]
        # Each line asks one question of all tensors at once: this runs at every step, for every parameter.
        if not (
            all(map(_is_here, grads))
            and [g.layout for g in grads].count(torch.strided) == len(grads)
            and [g.dtype for g in grads] == self.grad_dtypes
            and [g.shape for g in grads] == self.shapes
            and all(map(Tensor.is_contiguous, grads))
            and not any(map(Tensor.is_neg, grads))
            and all(map(Tensor.is_contiguous, self.params))
            and list(map(Tensor.data_ptr, self.params)) == self.pointers
            and _identities(self.states) == self.identities
            and all(_pointers(key, states) == pointers for key, states, pointers in self.watched)
            and (not any(self.block_sizes) or [_v_block_size(update) for update in self.updates] == self.block_sizes)
        ):
            return False
        return self._bring_gradients(grads)

    def _bring_gradients(self, grads: Sequence[Tensor]) -> bool:
        self.table["grad"] = list(map(Tensor.data_ptr, grads))
        return not (self.table["grad"] % self.item_sizes).any()

    def observe(self) -> NDArray[np.float32]:
        """First pass over the gradients; the sum of the squares of each."""
        self._make_room()
        _library().daypack_observe(*self._params(), torch.get_num_threads(), _at(self.totals))
        return self.totals

    def apply(self, active: NDArray[np.bool_], last: bool = True) -> None:
        """Second pass over the parameters that ``active`` marks. Counts their steps. ``last``: no more will follow."""
        sums = self.sums
        options, flags = self._options(), active.astype(np.uint8)
        marks = None if active.all() else _at(flags)
        bad = _library().daypack_apply(*self._params(), _at(options), marks, torch.get_num_threads())
        self._done(bad, active)
        if not last:
            self.sums = sums  # the others' statistics are still wanted

    def step(self) -> NDArray[np.bool_]:
        """Both passes at once, over all gradients that are finite; which ones are."""
        self._make_room()
        options = self._options()
        bad = _library().daypack_step(*self._params(), _at(options), torch.get_num_threads(), _at(self.totals))
        finite = np.isfinite(self.totals)
        self._done(bad, finite)
        return finite

    def _params(self) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
        return _at(self.table), ctypes.c_int64(len(self.table))

    def _options(self) -> NDArray[Any]:
        return np.array([_options(group) for group in self.groups], OPTIONS)

    def _make_room(self) -> None:
        self.sums = np.empty(self.sum_count, np.float32)
        self.table["sums"] = self.sum_offsets + np.uint64(self.sums.ctypes.data)

    def _done(self, bad: int, active: NDArray[np.bool_]) -> None:
        self.sums = np.zeros(0, np.float32)
        if bad >= 0:
            raise ValueError(
                f"the codebook of parameter {self.updates[bad].name} is not 256 multiples of 1/{codebook.GRID} that "
                "rise from -1 to 1; nothing was updated; load an undamaged checkpoint"
            )
        # Autograd must notice that values it saved for a backward pass are not there any more.
        stepped = self.params if active.all() else [self.params[i] for i in np.flatnonzero(active)]
        torch.autograd.graph.increment_version(stepped)


#: State keys that the kernels read, and the field of the table that points to each.
_FIELDS = {
    "step": "step",
    "exp_avg_codes": "codes",
    "exp_avg_scale": "scale",
    "exp_avg_codebook": "codebook",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "exp_avg_sq_row": "row",
    "exp_avg_sq_col": "col",
    "exp_avg_sq_block": "block",
}


#: One tensor of each state stands for all of them when their storage is exchanged under them (``value.data = ...``), as
#: wrappers that move state between devices do. Looking at every one would cost as much as a step of small parameters.
_WATCHED = ("exp_avg_codes", "exp_avg")


def _identities(states: Any) -> list[int]:
    """Which tensors the states hold."""
    return list(map(id, chain.from_iterable(map(dict.values, states))))


def _pointers(key: itemgetter[Any], states: list[dict[str, Any]]) -> list[int]:
    return list(map(Tensor.data_ptr, map(key, states)))


def _v_block_size(update: Update) -> int:
    """Columns per block mean; 0 where there are none."""
    if not isinstance(update.plan.exp_avg_sq, BlockMean):
        return 0
    return int(update.state.get("exp_avg_sq_block_size", 0)) or default_block_size(update.view.cols)


def _options(group: Any) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    numbers = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
    return (*map(float, numbers), -1.0 if group["maximize"] else 1.0)


# ---------------------------------------------------------------- calibration


def reads(grad: Tensor) -> bool:
    """Whether the calibration functions below can take ``grad``."""
    return library() is not None and grad.dtype in TYPES and grad.layout == torch.strided and _is_plain(grad)


def histogram(grad: Tensor, view: Geometry, block_size: int) -> Tensor:
    """`daypack.calibration.codebook.histogram`; the same counts."""
    counts = np.zeros(codebook.BINS, np.int64)
    sizes = (view.matrices * view.rows, view.cols, max(1, min(block_size, view.cols)))
    _library().daypack_histogram(
        ctypes.c_void_p(grad.data_ptr()),
        *map(ctypes.c_int64, (TYPES[grad.dtype], *sizes)),
        torch.get_num_threads(),
        _at(counts),
    )
    return torch.from_numpy(counts)


def find_block_size(grad: Tensor, view: Geometry) -> int:
    """`daypack.calibration.blocks.find_block_size`; scores agree to about 1e-6."""
    sizes = np.array(candidates(view.cols), np.int64)
    scores = np.zeros(len(sizes))
    if len(sizes) > 2:
        _library().daypack_block_scores(
            ctypes.c_void_p(grad.data_ptr()),
            *map(ctypes.c_int64, (TYPES[grad.dtype], view.matrices * view.rows, view.cols)),
            _at(sizes),
            ctypes.c_int64(len(sizes)),
            torch.get_num_threads(),
            _at(scores),
        )
    return block_size_from_scores(view.cols, scores.tolist())


def optimal_levels(weights: NDArray[np.float64], levels: int) -> NDArray[np.float64]:
    """`daypack.calibration.codebook.optimal_levels`; the same bits."""
    weights, found = np.ascontiguousarray(weights), np.empty(levels)
    count = _library().daypack_codebook(
        _at(weights), ctypes.c_int64(len(weights)), ctypes.c_int64(levels), torch.get_num_threads(), _at(found)
    )
    return codebook.with_pinned(found[:count], levels)
