"""A parameter seen as matrices: its geometry and its chunks, and how to read and write them with any strides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod

import torch
from torch import Tensor

#: Elements that one pass touches at a time. It bounds the temporary memory of a step (about eight fp32 buffers of this
#: size, 16 MiB) whatever the size of the parameter, and keeps those buffers within a CPU's last-level cache.
CHUNK_ELEMENTS = 1 << 19

Chunk = tuple[slice, slice, slice]


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
        """Return the geometry of the part of ``shape`` that begins at ``start`` of dim 0."""
        return Geometry(shape, self.batched, self.whole, start)

    @property
    def sharded(self) -> bool:
        return self.shape != self.whole

    @cached_property
    def origin(self) -> int:
        """Place of the first element in the whole parameter."""
        return self.start * prod(self.whole[1:])

    @cached_property
    def whole_rows(self) -> int:
        """Rows of a matrix on all ranks together."""
        return self.rows if self.batched or len(self.whole) < 2 else self.whole[0]

    @cached_property
    def matrices(self) -> int:
        return prod(self.shape[:-2]) if self.batched else 1

    @cached_property
    def rows(self) -> int:
        return self.shape[-2] if self.batched else (self.shape[0] if len(self.shape) > 1 else 1)

    @cached_property
    def cols(self) -> int:
        return self.shape[-1] if self.batched else prod(self.shape[1:] if len(self.shape) > 1 else self.shape)

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a per-row tensor: it keeps the parameter's leading dims, so a shard of dim 0 is a shard of it."""
        return self.shape[:-1] if self.batched else self.shape[:1] if len(self.shape) > 1 else ()

    @cached_property
    def col_shape(self) -> tuple[int, ...]:
        """Shape of a per-column tensor."""
        return (*self.shape[:-2], self.cols) if self.batched else (self.cols,)

    @cached_property
    def view3(self) -> tuple[int, int, int]:
        return self.matrices, self.rows, self.cols


@lru_cache(maxsize=4096)
def geometry(shape: tuple[int, ...]) -> Geometry:
    """Return the matrix view of ``shape`` with fewer row and column factors; ``[d0, rest]`` on a tie."""
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
    """Return the part of ``tensor`` under ``chunk``, ``[b, r, c]``: a view if the strides allow it, else a copy."""
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
    """Yield a view of ``tensor`` for each matrix of ``chunk``; its leading dim is the chunk's rows."""
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
    """Reshape ``[..., cols]`` to ``[..., ceil(cols / block), block]``, padding a shorter last block with zeros."""
    short = -x.shape[-1] % block
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.reshape(*x.shape[:-1], -1, block)


def block_count(cols: int, block: int) -> int:
    return ceil(cols / block)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of all arithmetic: fp64 for fp64 parameters, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
