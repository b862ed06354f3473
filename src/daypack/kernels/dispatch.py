"""Which kernel steps a parameter: the fastest one for its plan, dtype and device, unless ``fused`` says otherwise."""

from __future__ import annotations

from torch import Tensor

from daypack.kernels import reference
from daypack.plan import Update


def check(updates: list[Update]) -> None:
    """Raise ValueError if a parameter demands a fused kernel (``fused=True``) that does not exist."""
    for update in updates:
        if update.fused:
            raise ValueError(
                f"fused=True, but there is no fused kernel for parameter {update.name} on {update.param.device}; use "
                "fused=None (the fastest available) or fused=False (the torch reference)"
            )


def observe(updates: list[Update]) -> list[Tensor]:
    """First pass over the gradients: fills each ``sums``, writes nothing else, returns each sum of g^2 (0-dim)."""
    return [reference.observe(update) for update in updates]


def apply(updates: list[Update]) -> None:
    """Second pass: moments, rule, decay and parameters. ``update.state["step"]`` counts this step already."""
    for update in updates:
        reference.apply(update)
