"""References learn their codebooks with the native programme here: the same bits (test_calibration.py), sooner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daypack.calibration import tools
from daypack.kernels.native import calibration
from daypack.kernels.native import library as native


@pytest.fixture(autouse=True)
def quick_codebooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is not None and "calibration" not in request.module.__name__:
        faster = replace(tools.REFERENCE, optimal_levels=calibration.optimal_levels)
        monkeypatch.setattr(tools, "REFERENCE", faster)
