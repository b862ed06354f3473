"""Which placement a parameter has, and a step through state that has to be brought in piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daypack.formats.base import ComponentSpec, State
from daypack.kernels.dispatch import Work
from daypack.param import ParamStep
from daypack.placement.base import Placement, Resident
from daypack.placement.mapped import Mapped
from daypack.placement.staged import Staged

PLACEMENTS = ("resident", "paged")
#: Bytes of state that are brought in together; a larger parameter comes alone. Two pieces are in at a time.
PIECE_BYTES = 64 << 20


class Placements:
    """The placements in use by one optimizer. They are kept from step to step, because one may still be copying."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Placement] = {}

    @staticmethod
    def away(groups: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether any state has to be brought in for its step."""
        return any(group.get("placement", "resident") != "resident" for group in groups)

    def of(self, group: Mapping[str, Any], device: torch.device) -> Placement:
        """Return the placement of the state of parameters on ``device`` under the options of ``group``.

        Raises:
            ValueError: the group's state is to be paged, which is not possible there.
        """
        key = group.get("placement", "resident"), group.get("spill_dir"), device
        if key not in self._known:
            self._known[key] = _make(*key)
        return self._known[key]

    def create(self, spec: ComponentSpec, group: Mapping[str, Any], device: torch.device) -> Tensor:
        """Return a new state tensor of zeros in its place; scalars are never away."""
        home = self.of(group, device) if spec.shape else Resident(spec.device(device))
        return home.zeros(spec.shape, spec.dtype)

    def wait(self) -> None:
        """Wait until all state that is being copied has arrived, so that it can be read."""
        for placement in self._known.values():
            placement.wait()

    def apply(self, work: Work, admitted: NDArray[np.bool_]) -> None:
        """Run `Work.apply` piece by piece: while one piece of state is stepped, the next is brought in."""
        pieces = _pieces(work.items, admitted)
        coming = self._fetch(work.items, pieces[0]) if pieces else []
        for piece, following in zip(pieces, [*pieces, []][1:], strict=True):
            present, coming = coming, self._fetch(work.items, following)
            mask = np.zeros(len(work.items), bool)
            mask[piece] = True
            try:
                for item, placement, _, working in present:
                    item.state = placement.ready(working)
                work.apply(mask, last=not following)
            finally:
                for item, _, home, _ in present:
                    item.state = home
            for _, placement, home, working in present:
                placement.release(home, working)

    def _fetch(self, items: list[ParamStep], piece: list[int]) -> list[tuple[ParamStep, Placement, State, State]]:
        """Begin to fetch a piece. Returns each item with its placement, its state at home, and the fetched state."""
        chosen = [(items[i], self.of(items[i].group, items[i].param.device)) for i in piece]
        return [(item, placement, item.state, placement.fetch(item.state)) for item, placement in chosen]


def _make(kind: str, spill_dir: str | None, device: torch.device) -> Placement:
    if kind == "resident":
        return Resident(device)
    if device.type == "cpu":
        return Mapped(spill_dir)
    if device.type == "cuda":
        return Staged(device)
    raise ValueError(f"placement='paged' works for parameters on cpu and cuda, not on {device}; leave it 'resident'")


def _pieces(items: list[ParamStep], admitted: NDArray[np.bool_]) -> list[list[int]]:
    """Return the indices of the admitted items, in runs whose state takes at most `PIECE_BYTES` together."""
    pieces: list[list[int]] = []
    room = 0
    for i in np.flatnonzero(admitted).tolist():
        size = sum(value.nbytes for value in items[i].state.values() if isinstance(value, Tensor))
        if not pieces or size > room:
            pieces.append([])
            room = PIECE_BYTES
        pieces[-1].append(i)
        room -= size
    return pieces
