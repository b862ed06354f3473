"""Bytes of optimizer state from shapes alone, summed from the same component specs that allocation uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from daypack.optim.gefen import Gefen

STEP_BYTES = 4  # one fp32 counter per parameter


@dataclass(frozen=True)
class StateEstimate:
    """State of a set of parameters.

    Attributes:
        parameters: elements.
        total_bytes: bytes of state, step counters and codebooks included.
    """

    parameters: int
    total_bytes: int

    @property
    def bytes_per_param(self) -> float:
        return self.total_bytes / self.parameters if self.parameters else 0.0


def estimate_state(
    shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32, **options: object
) -> StateEstimate:
    """State that `daypack.Gefen` keeps for trainable parameters of ``shapes`` (global shapes) and ``dtype``.

    Exact for the factored second moment. With ``second_moment="blocks"`` the block size is found from data; the
    estimate is that of a row without structure.

    Args:
        options: Gefen's ``second_moment`` and ``block_size``.
    """
    # A throwaway optimizer over an empty tensor validates the options and holds the defaults.
    optimizer = Gefen([torch.empty(0)], **options)  # type: ignore[arg-type]
    elements = total = 0
    for shape in map(torch.Size, shapes):
        if any(size < 0 for size in shape):
            raise ValueError(f"a shape has sizes of at least 0, got {tuple(shape)}")
        plan = optimizer.plan(shape, dtype, optimizer.param_groups[0], "")
        elements += prod(shape)
        total += STEP_BYTES + plan.nbytes(shape, dtype)
    return StateEstimate(elements, total)
