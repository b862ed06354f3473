"""The suite creates hundreds of optimizers on the same gradients: learn each of their codebooks once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daypack.calibration import tools


@pytest.fixture(scope="session", autouse=True)
def remembered_codebooks() -> Iterator[None]:
    """Remember a pure function's results by the bytes of its input, for speed alone.

    The dynamic programme takes most of a first step here. A result is handed out as a copy, and equal histograms are
    the only ones that share it, so no scenario sees a difference.
    """
    original: Callable[..., Any] = tools.REFERENCE.optimal_levels
    known: dict[tuple[bytes, int], Any] = {}

    def remembered(weights: Any, levels: int) -> Any:
        key = (np.asarray(weights).tobytes(), levels)
        if key not in known:
            known[key] = original(weights, levels)
        return known[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "REFERENCE", replace(tools.REFERENCE, optimal_levels=remembered))
        yield
