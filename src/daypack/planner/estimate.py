"""Bytes of optimizer state from shapes alone, summed from the same component specs that allocation uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch

from daypack.optim.base import CompressedOptimizer
from daypack.optim.registry import REGISTRY, create

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
    shapes: Iterable[Sequence[int]], dtype: torch.dtype = torch.float32, optimizer: str = "gefen", **options: object
) -> StateEstimate:
    """State that an optimizer keeps for trainable parameters of ``shapes`` (global shapes) and ``dtype``.

    Exact but for Gefen's ``second_moment="blocks"``, whose block size is found from data: the estimate is that of a row
    without structure.

    Args:
        optimizer: the name of one of daypack's own.
        options: its options, such as Gefen's ``second_moment`` or ``bits=8`` of ``adam_mini``.

    Raises:
        ValueError: no such optimizer, or an option or a shape that cannot be.
    """
    if not issubclass(REGISTRY.get(optimizer, CompressedOptimizer), CompressedOptimizer):
        raise ValueError(f"{optimizer!r} is one of torch's own; estimates are made for daypack's, such as 'gefen'")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype of estimate_state must be a torch.dtype, got {dtype!r}")
    try:
        sizes = [torch.Size(shape) for shape in shapes]
    except TypeError:
        raise ValueError(
            "estimate_state takes shapes, such as [p.shape for p in model.parameters()], got "
            f"{type(shapes).__name__} {shapes!r:.60}"
        ) from None
    # A throwaway optimizer over an empty tensor validates the options and holds the defaults.
    planner = cast(CompressedOptimizer, create(optimizer, [torch.empty(0)], **options))
    elements = total = 0
    for shape in sizes:
        if any(size < 0 for size in shape):
            raise ValueError(f"a shape has sizes of at least 0, got {tuple(shape)}")
        plan = planner.plan(shape, dtype, planner.param_groups[0], "")
        elements += prod(shape)
        total += STEP_BYTES + plan.nbytes(shape, dtype)
    return StateEstimate(elements, total)
