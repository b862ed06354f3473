"""What ranks communicate in a step about parameters that are sharded over them.

Every rank takes part in the same collectives in every step. Buffers are laid out from groups and global shapes, never
from gradients: a rank without a gradient, with an empty part or with an error takes part too, so that no rank hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack import sharding
from daypack.geometry import accumulator
from daypack.kernels.dispatch import Work
from daypack.param import ParamPlan, ParamStep

#: Numbers of a parameter before its shared statistics: how many ranks have a gradient, how many failed, how many have a
#: gradient that is not all zeros (where that matters), and the sum of g^2.
_FLAGS = 4


class Exchange:
    """The sharded parameters of an optimizer, in the order of its groups.

    Args:
        members: each sharded parameter with its plan.
        away: whether state is paged, and so brought in piece by piece.

    Raises:
        ValueError: a rule needs norms of whole parameters, which pieces cannot give.
    """

    def __init__(self, members: Sequence[tuple[Tensor, ParamPlan]], away: bool = False) -> None:
        self._params = [p for p, _ in members]
        groups = [sharding.groups_of(p) for p in self._params]
        sizes = []
        for p, plan in members:
            sizes.append(_FLAGS + sum(plan.shared_counts(sharding.local_view(p, plan))))
        self._first = sharding.Buffer(groups, sizes)
        measured = [i for i, (_, plan) in enumerate(members) if plan.rule.measured]
        if measured and away:
            raise ValueError(
                f"{members[measured[0]][1].rule.name} needs norms of whole parameters, which paged state of sharded "
                "parameters cannot give yet; use placement='resident'"
            )
        self._measured = [self._params[i] for i in measured]
        self._second = sharding.Buffer([groups[i] for i in measured], [2] * len(measured))

    def first(
        self,
        work: Work | None,
        totals: NDArray[np.float64],
        unsure: Callable[[ParamStep], bool],
        error: ValueError | None,
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Add up statistics of g^2 over all ranks, and share what each rank knows of its gradients.

        Args:
            work: observed; None if this rank failed.
            totals: this rank's sums of g^2, one for each item.
            unsure: whether it matters that an item's gradient may be all zeros.
            error: what failed here.

        Returns:
            All ranks' sums of g^2, and whether any rank has a gradient, one for each item.

        Raises:
            ValueError: this rank failed, or another one.
        """
        entries = [
            torch.zeros(
                size, dtype=accumulator(p.dtype), device=sharding.to_local(p).device
            )  # whatever this rank knows
            for size, p in zip(self._first.sizes, self._params, strict=True)
        ]
        place = {id(p): i for i, p in enumerate(self._params)}
        mine = [(k, x, place[id(x.whole)]) for k, x in enumerate(work.items if work else ()) if id(x.whole) in place]
        shared = work.shared_sums() if work else []
        for k, item, i in mine:
            flags = [item.whole.grad is not None, 0, unsure(item) and not item.is_zero(), totals[k]]
            entries[i][:_FLAGS] = torch.tensor(flags, dtype=torch.float64)
            if shared[k]:
                entries[i][_FLAGS:] = torch.cat(shared[k])
        if error is not None:
            for entry in entries:
                entry[1] = 1
        sums = self._first.add_up(entries)
        if any(bool(part[1] > 0) for part in sums):
            raise error or ValueError("another rank refused its gradients; its error says why. Nothing was updated")
        together, present = totals.copy(), np.ones(len(totals), bool)
        for k, item, i in mine:
            has_grad, _, nonzero, together[k] = sums[i][:_FLAGS].tolist()
            present[k] = has_grad > 0
            item.zero = not nonzero if unsure(item) else None
            parts = torch.split(sums[i][_FLAGS:], [part.numel() for part in shared[k]])
            for own, whole in zip(shared[k], parts, strict=True):
                own.copy_(whole)
        return together, present

    def second(self, squares: dict[int, Tensor], items: Sequence[ParamStep]) -> dict[int, Tensor]:
        """Add up what rules measured over whole tensors, by the id of the item."""
        found = {id(item.whole): item for item in items if id(item) in squares}
        entries = []
        for p in self._measured:
            item = found.get(id(p))
            none = torch.zeros(2, dtype=torch.float64, device=sharding.to_local(p).device)
            entries.append(none if item is None else squares[id(item)])
        for p, part in zip(self._measured, self._second.add_up(entries), strict=True):
            if id(p) in found:
                squares[id(found[id(p)])] = part
        return squares
