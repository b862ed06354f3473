"""Shared by every test: one thread (these tests run on few, shared cores), a pinned hypothesis profile, codebooks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

# For numpy, torch and every process that a test starts. Where a test wants more threads than there are cores, the ones
# that wait must not keep the others from working.
for variable, value in {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}.items():
    os.environ.setdefault(variable, value)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from daypack.calibration import tools  # noqa: E402
from daypack.kernels.native import calibration, library  # noqa: E402

torch.set_num_threads(1)

# Examples are derived from the test itself, so that a run can be repeated; no deadline, because the machine is shared.
settings.register_profile("daypack", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("daypack")


def remembered(solve: Callable[[Any, int], Any], version: Callable[[], Any]) -> Callable[[Any, int], Any]:
    """``solve`` with its results kept by the bytes of its input and by what `version` says of how it computes them."""
    known: dict[tuple[bytes, int, Any], Any] = {}

    def solved(weights: Any, levels: int) -> Any:
        key = (hashlib.blake2b(np.asarray(weights).tobytes()).digest(), levels, version())
        if key not in known:
            known[key] = solve(weights, levels)
        return known[key].copy()

    return solved


@pytest.fixture(scope="session", autouse=True)
def remembered_codebooks() -> Iterator[None]:
    """Thousands of optimizers are created on the same gradients: each codebook is learned once, for speed alone.

    A result is handed out as a copy, and only equal histograms share it, for which the programme, a pure function, ran
    with as many threads of the same kernels. So no scenario sees a difference.
    """
    with pytest.MonkeyPatch.context() as patch:
        slow = remembered(tools.REFERENCE.optimal_levels, lambda: None)
        patch.setattr(tools, "REFERENCE", replace(tools.REFERENCE, optimal_levels=slow))
        if library.library() is not None:
            how = lambda: (library.cpu(), torch.get_num_threads())  # noqa: E731
            patch.setattr(calibration, "optimal_levels", remembered(calibration.optimal_levels, how))
        yield
