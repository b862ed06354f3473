"""Shared by every test: one thread (these tests run on few, shared cores), a pinned hypothesis profile, codebooks.

With ``--quick``, for while one writes: formats, calibration, optimizers, rules beside their twins, and one case of each
other scenario of the conformance suite, spread over the optimizers.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
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


QUICK = ("calibration", "conformance", "formats", "optim", "reference", "rules")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only " + ", ".join(QUICK) + "; one case of each scenario")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the rooms of the tests, leave out what is not `QUICK`, unread."""
    here = Path(__file__).parent
    outside = collection_path.parent == here and collection_path.name not in QUICK
    return True if outside and config.getoption("quick") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("quick"):
        return
    scenarios: dict[str, list[Any]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            alone = "conformance" not in item.path.parts or item.path.stem.endswith("_math")
            scenarios.setdefault(item.nodeid if alone else item.nodeid.partition("[")[0], []).append(item)
    seen: Counter[str] = Counter()
    chosen = set()
    for ids in scenarios.values():
        # The optimizer that came up least so far; its ids in turn, so that dtypes and other variants come up too.
        cases = {str(item.callspec.params["case"]) for item in ids if "case" in getattr(item, "fixturenames", ())}
        case = min(sorted(cases), key=seen.__getitem__, default="")
        of_case = [item for item in ids if not case or str(item.callspec.params["case"]) == case]
        chosen.add(of_case[seen[case] % len(of_case)] if case else of_case[0])
        seen[case] += 1
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
