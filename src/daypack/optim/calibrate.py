"""What is learned from the first gradients that are not zero: the codebook, and the blocks of the second moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from daypack import sharding
from daypack.calibration.blocks import block_size_from_scores
from daypack.calibration.codebook import BINS
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.kernels import dispatch, reference
from daypack.projection import stepped
from daypack.update import Update


class Calibration:
    """Calibrates each parameter once. What is learned stands in the state; here is only which state was looked at."""

    def __init__(self) -> None:
        self._done = WeakIdKeyDictionary()

    def is_done(self, update: Update) -> bool:
        """Whether the state of an update holds all that it learns."""
        return all(self._holds(form.learned(update.state, moment)) for moment, form in update.plan.moments)

    def run(self, updates: Sequence[Update], states: Iterable[dict[str, Tensor]]) -> bool:
        """Learn what ``updates`` still lack, from their gradients. Those whose gradient is all zeros wait for another.

        Args:
            states: of all parameters in group order; the first codebook among them is taken over.

        Returns:
            Whether statistics must be taken once more, because what they are taken over has changed.
        """
        fresh = [
            (update, moment, form)
            for update in updates
            for moment, form in update.plan.moments
            if not self._holds(form.learned(update.state, moment)) and not reference.is_zero(update)
        ]
        self._learn_codebook(
            [(u, moment, form) for u, moment, form in fresh if isinstance(form, BlockQuantized)], states
        )
        resized = [(update, moment, form) for update, moment, form in fresh if isinstance(form, BlockMean)]
        for update, moment, form in resized:
            form.resize_(update.state, moment, update.view, _block_size(update))
        return bool(resized)

    def _learn_codebook(
        self, coded: list[tuple[Update, str, BlockQuantized]], states: Iterable[dict[str, Tensor]]
    ) -> None:
        if not coded:
            return
        levels = next((v for s in states for key, v in s.items() if key.endswith("_codebook") and v.any()), None)
        if levels is None:
            levels = dispatch.learn(_histogram(coded), coded[0][2].block_size)
        for update, moment, _ in coded:
            update.state[moment + "_codebook"].copy_(levels)

    def _holds(self, learned: Tensor | None) -> bool:
        """Whether the tensor that is all zeros until calibration is so no more. Asked of the device once."""
        if learned is None or learned in self._done:
            return True
        if learned.any():
            self._done[learned] = True
            return True
        return False


def _histogram(coded: list[tuple[Update, str, BlockQuantized]]) -> Tensor:
    """Counts over all gradients, on all ranks that hold parts of them: one collective per set of process groups."""
    members: dict[sharding.Groups, list[tuple[Update, int]]] = {}
    for update, _, form in coded:
        members.setdefault(sharding.groups_of(update.whole), []).append((stepped(update), form.block_size))
    total = torch.zeros(BINS, dtype=torch.int64)
    for groups, updates in members.items():
        total += sharding.add_up(groups, dispatch.histogram(updates).to(updates[0][0].param.device)).cpu()
    return total


def _block_size(update: Update) -> int:
    """The size of the blocks that share a second moment, from the gradient's rows on all ranks."""
    low = stepped(update)
    rows = low.view.matrices * low.view.rows
    scores = torch.tensor([*dispatch.block_scores(low), 1.0], dtype=torch.float64, device=low.param.device) * rows
    *sums, count = sharding.add_up(sharding.groups_of(update.whole), scores).tolist()
    return block_size_from_scores(low.view.cols, [part / count for part in sums])
