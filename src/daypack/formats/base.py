"""What all stored forms of a moment share: the geometry of a parameter, its chunks, and the format protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil, prod
from typing import Any, ClassVar

import torch
from torch import Tensor

#: Elements that one pass touches at a time. It bounds the temporary memory of a step (about eight fp32 buffers of this
#: size, 16 MiB) whatever the size of the parameter, and keeps those buffers within a CPU's last-level cache.
CHUNK_ELEMENTS = 1 << 19

State = MutableMapping[str, Any]
Chunk = tuple[slice, slice, slice]


@dataclass(frozen=True)
class ComponentSpec:
    """One stored tensor of a moment. The allocator creates it and the planner sums it, so the two cannot disagree.

    Attributes:
        suffix: appended to the moment's name to give the state key (``"exp_avg" + "_codes"``).
        shape: global shape; it follows from the parameter's global shape alone, never from data or from a shard.
        dtype: storage type.
        follows: its dim 0 is dim 0 of the parameter, so that a shard of the one is a shard of the other; False where
            every rank holds the whole of it.
    """

    suffix: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    follows: bool = True

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def device(self, param: torch.device) -> torch.device:
        """Where the tensor of a parameter on device ``param`` lives: single numbers, which Python reads, on the CPU."""
        return torch.device("cpu") if self.shape == () else param


@dataclass(frozen=True)
class Geometry:
    """A parameter, or one rank's shard of it along dim 0, seen as ``matrices`` matrices of ``rows x cols``.

    Attributes:
        shape: the shape of what is here.
        batched: True where the leading dims ``shape[:-2]`` count separate matrices (experts), False where everything
            behind dim 0 is one row (linear and convolution weights). Decided by the whole parameter.
        whole: the whole parameter's shape.
        start: where in dim 0 of the whole parameter this shard begins.
    """

    shape: tuple[int, ...]
    batched: bool
    whole: tuple[int, ...]
    start: int = 0

    def shard(self, shape: tuple[int, ...], start: int) -> Geometry:
        """The part of ``shape`` that begins at ``start`` of dim 0."""
        return Geometry(shape, self.batched, self.whole, start)

    @property
    def sharded(self) -> bool:
        return self.shape != self.whole

    @property
    def origin(self) -> int:
        """Place of the first element in the whole parameter."""
        return self.start * prod(self.whole[1:])

    @property
    def whole_rows(self) -> int:
        """Rows of a matrix on all ranks together."""
        return self.rows if self.batched or len(self.whole) < 2 else self.whole[0]

    @property
    def matrices(self) -> int:
        return prod(self.shape[:-2]) if self.batched else 1

    @property
    def rows(self) -> int:
        return self.shape[-2] if self.batched else (self.shape[0] if len(self.shape) > 1 else 1)

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.batched else prod(self.shape[1:] if len(self.shape) > 1 else self.shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a per-row tensor: it keeps the parameter's leading dims, so a shard of dim 0 is a shard of it."""
        return self.shape[:-1] if self.batched else self.shape[:1] if len(self.shape) > 1 else ()

    @property
    def col_shape(self) -> tuple[int, ...]:
        """Shape of a per-column tensor."""
        return (*self.shape[:-2], self.cols) if self.batched else (self.cols,)

    @property
    def view3(self) -> tuple[int, int, int]:
        return self.matrices, self.rows, self.cols


@lru_cache(maxsize=4096)
def geometry(shape: tuple[int, ...]) -> Geometry:
    """The matrix view of ``shape`` that stores fewer row and column factors; ``[d0, rest]`` where they tie."""
    flat, batched = Geometry(shape, False, shape), Geometry(shape, True, shape)
    if len(shape) < 3 or 0 in shape:
        return flat

    def factors(view: Geometry) -> int:
        return prod(view.row_shape) + prod(view.col_shape)

    return batched if factors(batched) < factors(flat) else flat


def chunks(view: Geometry, align: int = 1) -> Iterator[Chunk]:
    """Cover the ``[matrices, rows, cols]`` view in pieces of at most `CHUNK_ELEMENTS` elements (or one ``align``).

    Args:
        align: pieces of a row start at multiples of this many columns, so that no block is cut.
    """
    matrices, rows, cols = view.view3
    if matrices * rows * cols == 0:
        return
    every = slice(None)
    if rows * cols <= CHUNK_ELEMENTS:
        many = CHUNK_ELEMENTS // (rows * cols)
        for b in range(0, matrices, many):
            yield slice(b, min(b + many, matrices)), every, every
    elif cols <= CHUNK_ELEMENTS:
        many = CHUNK_ELEMENTS // cols
        for b in range(matrices):
            for r in range(0, rows, many):
                yield slice(b, b + 1), slice(r, min(r + many, rows)), every
    else:
        wide = max(align, CHUNK_ELEMENTS // align * align)
        for b in range(matrices):
            for r in range(rows):
                for c in range(0, cols, wide):
                    yield slice(b, b + 1), slice(r, r + 1), slice(c, min(c + wide, cols))


def read(tensor: Tensor, view: Geometry, chunk: Chunk) -> Tensor:
    """The part of ``tensor`` under ``chunk``, ``[b, r, c]``: a view where the strides allow one, else a small copy."""
    try:
        return tensor.view(view.view3)[chunk]
    except RuntimeError:  # strides that do not merge: channels_last, permuted experts
        return torch.stack([part.reshape(-1, view.cols)[:, chunk[2]] for part in _parts(tensor, view, chunk)])


def write_(tensor: Tensor, view: Geometry, chunk: Chunk, value: Tensor) -> None:
    """Store ``value`` ``[b, r, c]`` under ``chunk``, rounded to nearest in the tensor's dtype, strides kept."""
    try:
        target = tensor.view(view.view3)[chunk]
    except RuntimeError:
        for part, new in zip(_parts(tensor, view, chunk), value, strict=True):
            rows = part.reshape(-1, view.cols)
            rows[:, chunk[2]] = new.to(rows.dtype)
            part.copy_(rows.view(part.shape))
        return
    target.copy_(value)


def _parts(tensor: Tensor, view: Geometry, chunk: Chunk) -> Iterator[Tensor]:
    """Views of ``tensor``, one a matrix of ``chunk``, whose leading dim is the chunk's rows. Nothing is copied."""
    if not view.batched:
        yield tensor[chunk[1]]
        return
    lead = view.shape[:-2]
    for matrix in range(*chunk[0].indices(view.matrices)):
        part, rest = tensor, matrix
        for size, below in zip(lead, (prod(lead[i + 1 :]) for i in range(len(lead))), strict=True):
            part, rest = part[rest // below % size], rest % below
        yield part[chunk[1]]


def blocked(x: Tensor, block: int) -> Tensor:
    """``[..., cols]`` as ``[..., ceil(cols / block), block]``, a ragged last block padded with zeros."""
    short = -x.shape[-1] % block
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.reshape(*x.shape[:-1], -1, block)


def block_count(cols: int, block: int) -> int:
    return ceil(cols / block)


class StateFormat:
    """How one moment of one parameter is stored. Formats are frozen dataclasses: settings only, never tensors.

    A moment lives in the optimizer's state under its name plus the suffixes of `components`. There are two kinds.
    *Storage* formats hold any value: `decode`, update in fp32, `encode_`. *Statistics* formats (`statistics` True) hold
    sums over rows, columns or blocks of g^2: `observe` adds up one pass over the gradient, `combine` updates the state
    once, and `decode` then reads the NEW moment, because no element may move before its statistics are complete.
    """

    statistics: ClassVar[bool] = False

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        """The tensors to allocate; ``dtype`` is the parameter's."""
        raise NotImplementedError

    def saved(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        """The tensors as ``state_dict()`` shows them."""
        return self.components(view, dtype)

    def align(self, view: Geometry) -> int:
        """A chunk of a row may start only at multiples of this many columns."""
        return 1

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        """The moment under ``chunk``, ``[b, r, c]``, fp32 (fp64 for fp64 parameters). May alias the state.

        A statistic that is the same along a dim may be of size 1 there.
        """
        raise NotImplementedError

    def decoder(self, state: State, name: str, view: Geometry) -> Callable[[Chunk], Tensor]:
        """`decode` for many chunks of one moment; a format may do once what does not depend on the chunk."""
        return partial(self.decode, state, name, view)

    def encode_(self, state: State, name: str, view: Geometry, chunk: Chunk, value: Tensor, step: int) -> None:
        """Store ``value`` ``[b, r, c]``; ``step`` (from 1) is the step being taken."""
        raise NotImplementedError

    def sums(self, state: State, name: str, view: Geometry, like: Tensor) -> tuple[Tensor, ...]:
        """Zeroed accumulators for `observe`, on the device of ``like`` and in its dtype."""
        return ()

    def observe(self, sums: tuple[Tensor, ...], view: Geometry, chunk: Chunk, squared: Tensor) -> None:
        """Add ``squared`` (g^2 under ``chunk``, ``[b, r, c]``) to the accumulators. Writes nothing else."""

    def shared(self, view: Geometry) -> int:
        """How many numbers among the `sums` over a shard belong to all shards and are added up over them."""
        return 0

    def shared_sums(self, sums: tuple[Tensor, ...]) -> Tensor:
        """Those numbers, a view. Asked only if there are any."""
        raise NotImplementedError

    def combine(self, state: State, name: str, view: Geometry, sums: tuple[Tensor, ...], beta: float) -> None:
        """Moving average with decay ``beta`` of the mean of g^2, from complete ``sums``, which it uses up."""

    def save(self, state: State, name: str, view: Geometry) -> dict[str, Any]:
        """Entries that ``state_dict()`` shows in another shape than the live state has; none for most formats."""
        return {}

    def load_(self, state: State, name: str, view: Geometry) -> None:
        """Undo `save` in place. Does nothing to state that is in its live shape already."""

    def learned(self, state: State, name: str) -> Tensor | None:
        """The tensor that is all zeros until calibration has filled it; None if this format learns nothing."""
        return None

    def fault(self, state: State, name: str, view: Geometry) -> str | None:
        """What is wrong with saved values whose shapes and dtypes are right; None if nothing is."""
        return None


def smallest(view: Geometry, dtype: torch.dtype, *forms: StateFormat) -> StateFormat:
    """The one of ``forms`` that stores a moment of this geometry in the fewest bytes; the first of equals."""
    return min(forms, key=lambda form: sum(spec.nbytes for spec in form.components(view, dtype)))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of every formula: fp64 for fp64 parameters, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
