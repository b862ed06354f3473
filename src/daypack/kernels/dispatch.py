"""Which kernel steps a parameter: the fastest one for its plan, dtype and device, unless something forces another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration import blocks, codebook
from daypack.kernels import learning, native, reference
from daypack.update import Update

Kernel = Literal["native", "reference"]

#: Squares that rules measured, by the id of their update -> the sums over all ranks.
AddUp: TypeAlias = Callable[[dict[int, Tensor]], dict[int, Tensor]]

_forced: ContextVar[Kernel | None] = ContextVar("daypack_kernel", default=None)


@contextmanager
def use(kernel: Kernel) -> Iterator[None]:
    """Step every parameter with ``kernel`` inside the block, whatever ``fused`` says.

    Raises:
        ValueError: there is no such kernel; at a step, it cannot take a parameter.
    """
    if kernel not in ("native", "reference"):
        raise ValueError(f"kernel must be 'native' or 'reference', got {kernel!r}")
    token = _forced.set(kernel)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> Kernel | None:
    return _forced.get()


class Work:
    """The updates of one step, each with its kernel. Kept from step to step while `refresh` says that it holds.

    Args:
        idle: the parameters without a gradient.

    Attributes:
        settled: every state exists and all that is learned from first gradients is learned.
        kernels: per update ``"native"`` or ``"reference"``.

    Raises:
        ValueError: a parameter demands a fused kernel (``fused=True``) and none can take it.
    """

    def __init__(self, updates: list[Update], idle: list[Tensor]) -> None:
        self.updates = updates
        self._idle = idle
        self.kernels: list[Kernel] = [_choose(update) for update in updates]
        chosen = np.array([kernel == "native" for kernel in self.kernels], bool)
        self._native, self._rest = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        self._batch = native.Batch([updates[i] for i in self._native]) if len(self._native) else None
        self._projected = [i for i in self._native.tolist() if updates[i].plan.projection]
        self.settled = False

    @property
    def rest(self) -> list[Update]:
        """The updates that the reference takes."""
        return [self.updates[i] for i in self._rest]

    def refresh(self) -> bool:
        """Take in this step's gradients; False if tensors have changed so that the work must be laid out anew."""
        if any(p.grad is not None for p in self._idle) or any(update.param.grad is None for update in self.rest):
            return False
        if any(_choose(update) == "native" for update in self.rest):
            return False
        return self._batch is None or self._batch.refresh()

    def attach(self) -> None:
        """Take in state that was created or laid out anew since."""
        if self._batch is not None:
            self._batch.attach()

    def observe(self) -> NDArray[np.float64]:
        """First pass over every gradient, which writes nothing but statistics; the sum of g^2 of each update.

        A sum is not finite if the gradient is not, or if a statistic of it would overflow.
        """
        totals = np.zeros(len(self.updates))
        if self._batch is not None:
            totals[self._native] = self._batch.observe()
        totals[self._rest] = _numbers([reference.observe(update) for update in self.rest])
        _note_zeros(self.updates, totals)
        return totals

    def step(self) -> NDArray[np.bool_]:
        """Both passes over every update whose gradient is finite; which ones are.

        For updates that need no decision between the passes: gradients are read again while they are in the cache.
        """
        if any(self.updates[i].state["basis_left"] == 0 for i in self._projected):
            finite = np.isfinite(self.observe())
            self.apply(finite)
            return finite
        finite = np.ones(len(self.updates), bool)
        if self._batch is not None:
            finite[self._native] = self._batch.step()
        totals = np.array(_numbers([reference.observe(update) for update in self.rest]))
        finite[self._rest] = np.isfinite(totals)
        _note_zeros(self.rest, totals)
        stepped = [self.updates[i] for i in self._rest if finite[i]]
        for update in stepped:
            reference.combine(update)
            reference.apply(update, reference.measure(update) if update.plan.measures else None)
        return finite

    def apply(self, admitted: NDArray[np.bool_], last: bool = True, add_up: AddUp | None = None) -> None:
        """Second pass over the updates marked by ``admitted``: steps, moments, rule, decay and parameters.

        Args:
            last: no other updates of this step will follow.
            add_up: makes sums over all ranks of what rules measure of each update, if parts of them are elsewhere.
        """
        if self._batch is not None and (self._projected or len(self._rest)):
            self._batch.check(admitted[self._native])  # before the others change
        stepped = [self.updates[i] for i in self._rest if admitted[i]]
        for update in stepped:
            reference.combine(update)
        measured = self._batch.measure(admitted[self._native]) if self._batch is not None else {}
        squares = {id(self._batch.updates[k]): part for k, part in measured.items()} if self._batch else {}
        squares |= {id(update): reference.measure(update) for update in stepped if update.plan.measures}
        if add_up is not None:
            squares = add_up(squares)
        for i in self._projected:
            if admitted[i]:
                reference.refresh(self.updates[i])
        if self._batch is not None:
            for k, part in measured.items():
                part.copy_(squares[id(self._batch.updates[k])])  # where the kernels read them
            self._batch.apply(admitted[self._native], last)
        for update in stepped:
            reference.apply(update, squares.get(id(update)))

    def shared_sums(self) -> list[Tensor]:
        """Per update the statistics that belong to all ranks, to be added up in place between the passes; 1-D."""
        found = [torch.zeros(0)] * len(self.updates)
        for k, i in enumerate(self._native):
            part = self._batch.shared_sums(k) if self._batch else None
            found[i] = found[i] if part is None else part
        for i in self._rest:
            update = self.updates[i]
            form = update.plan.exp_avg_sq
            if form and form.shared(update.view):
                found[i] = form.shared_sums(update.sums).view(-1)
        return found


def _choose(update: Update) -> Kernel:
    fused = {"native": True, "reference": False}.get(_forced.get() or "", update.group["fused"])
    if fused is False:
        return "reference"
    refused = native.refusal(update)
    if refused and fused and update.whole.grad is not None:  # a gradient that only other ranks have has no memory here
        raise ValueError(
            f"fused=True, but {refused} (parameter {update.name}); use fused=None (the fastest available) or "
            "fused=False (the torch reference)"
        )
    return "reference" if refused else "native"


def _note_zeros(updates: list[Update], totals: NDArray[np.float64]) -> None:
    """A sum of g^2 over 0 says that a gradient is not zero; a sum of 0 says nothing, because squares vanish."""
    for update, total in zip(updates, totals.tolist(), strict=True):
        update.zero = False if total > 0 else None


def _numbers(totals: list[Tensor]) -> list[float]:
    """The value of each 0-dim tensor; one transfer from each device."""
    result: dict[int, float] = {}
    for device in {total.device for total in totals}:
        here = [(i, total) for i, total in enumerate(totals) if total.device == device]
        values = torch.stack([total.to(torch.float64) for _, total in here]).tolist()
        result.update(zip((i for i, _ in here), values, strict=True))
    return [result[i] for i in range(len(totals))]


# ---------------------------------------------------------------- calibration


def _reads(update: Update) -> bool:
    return _forced.get() != "reference" and update.group["fused"] is not False and learning.reads(update.grad)


def histogram(coded: Iterable[tuple[Update, int]]) -> Tensor:
    """Counts of the normalised gradients of updates, each with its block size, for `learn`; int64 on the CPU."""
    counts = torch.zeros(codebook.BINS, dtype=torch.int64)
    for update, block_size in coded:
        if _reads(update):
            learning.add_histogram(counts, update.grad, update.view, block_size)
        else:
            counts += codebook.histogram(update.grad, update.view, block_size).cpu()
    return counts


def learn(counts: Tensor, block_size: int) -> Tensor:
    """The codebook for ``counts``: fp32 on the CPU."""
    solve = (
        codebook.optimal_levels if _forced.get() == "reference" or native.library() is None else learning.optimal_levels
    )
    return codebook.learn(counts, block_size, solve)


def block_scores(update: Update) -> list[float]:
    """The scores of the block sizes that an update's second moment may have, from its gradient."""
    score = learning.block_scores if _reads(update) else blocks.block_scores
    return score(update.grad, update.view)
