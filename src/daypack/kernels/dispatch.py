"""Which backend steps a parameter: the first one in a list that takes it, unless something forces another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration.tools import REFERENCE, Tools
from daypack.kernels.backend import AddUp, Backend, Batch, Mask
from daypack.kernels.native.backend import Native
from daypack.kernels.reference import Reference, note_zeros
from daypack.param import ParamStep

#: In order of preference; the last one takes everything.
BACKENDS: tuple[Backend, ...] = (Native(), Reference())


def available() -> dict[str, str]:
    """Return the backends that can run here, in order of preference, and what each runs on."""
    found = {backend.name: backend.about() for backend in BACKENDS}
    return {name: about for name, about in found.items() if about is not None}


_forced: ContextVar[str | None] = ContextVar("daypack_backend", default=None)


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Step every parameter with ``backend`` inside the block, whatever ``fused`` says.

    Raises:
        ValueError: there is no such backend; at a step, it cannot take a parameter.
    """
    names = [each.name for each in BACKENDS]
    if backend not in names:
        raise ValueError(f"backend must be one of {', '.join(map(repr, names))}, got {backend!r}")
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """Return the backend that `use` demands, if any."""
    return _forced.get()


def choose(item: ParamStep) -> Backend:
    """Return the backend that steps ``item``.

    Raises:
        ValueError: it demands a fused one (``fused=True``), or `use` demands one that does not take it.
    """
    refusals = []
    for backend in _allowed(item.group["fused"]):
        refused = backend.refusal(item)
        if refused is None:
            return backend
        refusals.append(refused)
    if item.whole.grad is None:  # a gradient that only other ranks have has no memory here
        return BACKENDS[-1]
    raise ValueError(
        f"fused=True, but {refusals[0]} (parameter {item.name}); use fused=None (the fastest available) or "
        "fused=False (the torch reference)"
    )


def _allowed(fused: bool | None) -> list[Backend]:
    """Return the backends that may be chosen under the group option ``fused``, in order of preference."""
    name = _forced.get()
    if name is not None:
        return [backend for backend in BACKENDS if backend.name == name]
    return [backend for backend in BACKENDS if fused is None or backend.fused == fused]


class Work:
    """The parameters of one step, in a batch for each backend. Kept from step to step while `refresh` says it holds.

    Args:
        items: the parameters with a gradient, checked.
        idle: the parameters without one.

    Attributes:
        settled: every state exists and all that is learned from first gradients is learned.
        backends: the name of the backend of each parameter.

    Raises:
        ValueError: a parameter demands a fused backend and none takes it.
    """

    def __init__(self, items: list[ParamStep], idle: list[Tensor]) -> None:
        self.items = items
        self._idle = idle
        chosen = [choose(item) for item in items]
        self.backends = [backend.name for backend in chosen]
        self._batches: list[tuple[NDArray[np.int64], Batch]] = []
        #: Parameters that a better backend refused this time: it may accept them when a gradient's layout changes.
        self._second_best = []
        for backend in BACKENDS:
            places = [i for i, each in enumerate(chosen) if each is backend]
            if places:
                self._batches.append((np.array(places), backend.batch([items[i] for i in places])))
                self._second_best += [(items[i], backend) for i in places if backend is not BACKENDS[0]]
        self.settled = False

    def refresh(self) -> bool:
        """Take in this step's gradients; False if tensors have changed so that the work must be laid out anew."""
        if any(p.grad is not None for p in self._idle):
            return False
        if not all(batch.refresh() for _, batch in self._batches):
            return False
        return all(choose(item) is backend for item, backend in self._second_best)

    def attach(self) -> None:
        """Read the state again, after it was created or its layout changed."""
        for _, batch in self._batches:
            batch.attach()

    def observe(self) -> NDArray[np.float64]:
        """Take the first pass over every gradient: fill the statistics and return the sum of g^2 of each parameter."""
        totals = np.zeros(len(self.items))
        for places, batch in self._batches:
            totals[places] = batch.observe()
        note_zeros(self.items, totals)
        return totals

    def shared_sums(self) -> list[list[Tensor]]:
        """Return, for each parameter, the 1-D statistics to be added up over ranks, in place, between the passes."""
        found: list[list[Tensor]] = [[] for _ in self.items]
        for places, batch in self._batches:
            for i, parts in zip(places.tolist(), batch.shared_sums(), strict=True):
                found[i] = parts
        return found

    def step(self) -> Mask:
        """Take both passes over every parameter whose gradient is finite, and return which ones are.

        For steps that need no decision between the passes: gradients are read again while they are in the cache.
        """
        finite = np.ones(len(self.items), bool)
        if len(self._batches) > 1:  # one by one they would change some parameters before others are checked
            self._check(finite)
        for places, batch in self._batches:
            finite[places] = batch.step()
        return finite

    def apply(self, admitted: Mask, last: bool = True, add_up: AddUp | None = None) -> None:
        """Take the second pass over the parameters marked by ``admitted``.

        Args:
            last: no other parameters of this step will follow.
            add_up: makes sums over all ranks of what rules measure of each parameter, if parts of them are elsewhere.
        """
        self._check(admitted)
        measured = [batch.measure(admitted[places]) for places, batch in self._batches]
        found = list(zip(self._batches, measured, strict=True))
        if add_up is not None:
            every = {id(batch.items[k]): part for (_, batch), squares in found for k, part in squares.items()}
            every = add_up(every)
            for (_, batch), squares in found:
                squares.update({k: every[id(batch.items[k])] for k in squares})
        for (places, batch), squares in found:
            batch.apply(admitted[places], squares, last)

    def _check(self, active: Mask) -> None:
        """Ask every batch before any of them changes anything."""
        for places, batch in self._batches:
            batch.check(active[places])


def tools(grad: Tensor, fused: bool | None = None) -> Tools:
    """Return the fastest functions for calibrating from ``grad``, under the group option ``fused``."""
    found = (backend.tools(grad) for backend in _allowed(fused))
    return next((each for each in found if each is not None), REFERENCE)
