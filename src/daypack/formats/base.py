"""What all stored forms of a moment share: the tensors they consist of, and the format protocol."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from daypack.calibration.tools import Tools
from daypack.geometry import Chunk, Geometry

State = MutableMapping[str, Any]


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
        """Return where this tensor of a parameter on ``param`` is: scalars, which Python reads, are on the CPU."""
        return torch.device("cpu") if self.shape == () else param


@dataclass(frozen=True)
class Codes:
    """A moment as codes, for looking at: ``levels[code] * scale``.

    Attributes:
        view: rows within which blocks are counted.
        read: codes ``[b, r, c]`` and scales ``[b, r, blocks]`` under a chunk.
        levels: what codes stand for, rising.
        block_size: elements per scale; the last block of a row may be shorter.
        dithered: whether values were rounded up or down in turn instead of to the nearest level.
    """

    view: Geometry
    read: Callable[[Chunk], tuple[Tensor, Tensor]]
    levels: Tensor
    block_size: int
    dithered: bool

    def is_end(self) -> Tensor:
        """Return which levels are outermost, as bools: both ends, or the upper one only where levels begin at 0."""
        end = torch.zeros(len(self.levels), dtype=torch.bool)
        end[-1], end[0] = True, bool(self.levels[0] < 0)
        return end


class StateFormat:
    """How one moment of one parameter is stored. Formats are frozen dataclasses: settings only, never tensors.

    A moment lives in the optimizer's state under its name plus the suffixes of `components`. There are two kinds.
    *Storage* formats hold any value: `decode`, update in fp32, `encode_`. *Statistics* formats (`statistics` True) hold
    sums over rows, columns or blocks of g^2: `observe` adds up one pass over the gradient, `combine` updates the state
    once, and `decode` then reads the NEW moment, because no element may move before its statistics are complete.

    Some formats learn something from the first gradients (levels, block sizes): `gather` measures it on each shard,
    what all shards gathered is added up, `solve` makes of the sum what is learned, and `calibrate_` puts that into the
    state. `learned` says whether it is there.

    Attributes:
        statistics: whether it is a statistics format.
    """

    statistics: ClassVar[bool] = False

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        """Return the tensors to allocate; ``dtype`` is the parameter's."""
        raise NotImplementedError

    def saved(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        """Return the tensors as ``state_dict()`` shows them."""
        return self.components(view, dtype)

    def align(self, view: Geometry) -> int:
        """Return the multiple of columns at which a chunk of a row may start."""
        return 1

    def decode(self, state: State, name: str, view: Geometry, chunk: Chunk) -> Tensor:
        """Return the moment under ``chunk``, ``[b, r, c]``, fp32 (fp64 for fp64 parameters). It may share the state's
        memory.

        A statistic that is the same along a dim may be of size 1 there.
        """
        raise NotImplementedError

    def decoder(self, state: State, name: str, view: Geometry) -> Callable[[Chunk], Tensor]:
        """Return `decode` for many chunks of one moment, so that work common to all chunks is done once."""
        return partial(self.decode, state, name, view)

    def encode_(self, state: State, name: str, view: Geometry, chunk: Chunk, value: Tensor, step: int) -> None:
        """Store ``value`` ``[b, r, c]``; ``step`` (from 1) is the step being taken."""
        raise NotImplementedError

    def sums(self, state: State, name: str, view: Geometry, like: Tensor) -> tuple[Tensor, ...]:
        """Return zeroed accumulators for `observe`, on the device of ``like`` and in its dtype."""
        return ()

    def observe(self, sums: tuple[Tensor, ...], view: Geometry, chunk: Chunk, squared: Tensor) -> None:
        """Add ``squared`` (g^2 under ``chunk``, ``[b, r, c]``) to the accumulators. Writes nothing else."""

    def shared(self, view: Geometry) -> int:
        """Return how many of the `sums` over a shard belong to the whole parameter and are added up over shards."""
        return 0

    def shared_sums(self, sums: tuple[Tensor, ...]) -> Tensor:
        """Return these sums as a view. Called only if there are any."""
        raise NotImplementedError

    def combine(self, state: State, name: str, view: Geometry, sums: tuple[Tensor, ...], beta: float) -> None:
        """Update the moving average of g^2, with decay ``beta``, from complete ``sums``, which may be overwritten."""

    def save(self, state: State, name: str, view: Geometry) -> dict[str, Any]:
        """Return the entries that ``state_dict()`` shows in another shape than the live state; mostly none."""
        return {}

    def load_(self, state: State, name: str, view: Geometry) -> None:
        """Undo `save` in place. Does nothing to state that is in its live shape already."""

    def learned(self, state: State, name: str) -> Tensor | None:
        """Return the tensor that is all zeros until calibration fills it; None if this format learns nothing."""
        return None

    @property
    def lesson(self) -> str | None:
        """Name of what is learned: parameters whose formats have the same lesson learn one thing together, from the sum
        of what all of them gathered. None: each parameter for itself."""
        return None

    def gather(self, x: Tensor, view: Geometry, tools: Tools) -> Tensor:
        """Return what a first gradient ``x`` tells, as 1-D numbers that can be added up. Only called if the format
        learns.
        """
        raise NotImplementedError

    def solve(self, total: Tensor, view: Geometry, tools: Tools) -> Tensor:
        """Return what is learned, given the sum of what was gathered."""
        raise NotImplementedError

    def calibrate_(self, state: State, name: str, view: Geometry, found: Tensor) -> bool:
        """Put into the state what was learned, by this parameter or by another one with the same lesson.

        Returns:
            Whether statistics must be taken once more, because what they are taken over has changed.
        """
        raise NotImplementedError

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        """Say what is wrong with saved values whose shapes and dtypes are right; None if nothing is.

        Args:
            squares: the moment is a mean of squares, which is never negative.
        """
        return None

    # ------------------------------------------------------- for looking at

    def label(self, state: State, name: str) -> str:
        """Return how the moment is stored, in a few characters."""
        return type(self).__name__.lower()

    def codes(self, state: State, name: str, view: Geometry) -> Codes | None:
        """Return the moment as codes; None where it is stored otherwise."""
        return None

    def means(self, state: State, name: str) -> Tensor | None:
        """Return the means that each stand for many elements; None where there are none."""
        return None


def not_squares(key: str, value: Tensor) -> str | None:
    """Say what is wrong with a tensor of mean squares, or of scales; None if nothing is."""
    if (value.isfinite() & (value >= 0)).all():
        return None
    return f"{key} holds a value that is negative or not finite"


def smallest(view: Geometry, dtype: torch.dtype, *forms: StateFormat) -> StateFormat:
    """Return the one of ``forms`` that stores a moment of this geometry in the fewest bytes; the first on a tie."""
    return min(forms, key=lambda form: sum(spec.nbytes for spec in form.components(view, dtype)))
