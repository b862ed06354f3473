"""References learn their codebooks with the native programme here: the same bits (test_calibration.py), sooner."""

from __future__ import annotations

import pytest

from daypack.calibration import codebook
from daypack.kernels.native import calibration as learning
from daypack.kernels.native import library as native


@pytest.fixture(autouse=True)
def quick_codebooks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is not None and "calibration" not in request.module.__name__:
        monkeypatch.setattr(codebook, "optimal_levels", learning.optimal_levels)
