"""Which parameters a step moves: all but those with a gradient that is not finite, and those that are only probed."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np

from daypack.kernels.backend import Mask
from daypack.param import ParamStep


def admit(
    items: list[ParamStep],
    finite: Mask,
    skipped: Counter[str],
    probing: bool,
    present: Mask | None = None,
) -> Mask:
    """Decide which of ``items`` are stepped, and count the others whose gradients are not finite in ``skipped``.

    The probe is how torch.distributed.checkpoint has state created: a step with lr 0 on all-zero gradients of
    parameters that were never stepped. lr 0 alone may be a warm-up, and a zero gradient alone
    occurs in LoRA, so both are required.

    Args:
        finite: whether all ranks' gradients are finite, for each item.
        probing: whether a learning rate is 0.
        present: whether any rank has a gradient; None: all have.

    Raises:
        ValueError: a gradient is not finite, and its group has ``nonfinite="raise"``.
    """
    for i in np.flatnonzero(~finite):
        _pass_over(skipped, items[i])
    finite = finite if present is None else finite & present
    if not probing:
        return finite
    probed = [float(item.group["lr"]) == 0 and item.steps == 0 and item.is_zero() for item in items]
    kept: Mask = finite & ~np.array(probed, bool)
    return kept


def _pass_over(skipped: Counter[str], item: ParamStep) -> None:
    problem = f"the gradient of parameter {item.name} is not finite, or its norm is beyond fp32 (1.8e19)"
    if item.group["nonfinite"] == "raise":
        raise ValueError(f"{problem}; nothing was updated (nonfinite='skip' passes over such parameters)")
    skipped[item.name] += 1
    if skipped[item.name] == 1:
        warnings.warn(
            f"{problem}; it is passed over with its state. Counted in optimizer.skipped, not warned of again",
            stacklevel=5,
        )
