"""What the native kernels learn from first gradients is what numpy and torch learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daypack.calibration import blocks, codebook
from daypack.geometry import geometry
from daypack.kernels.native import calibration

from ..conformance.scene import noise, structured
from .pairs import TYPES, cpu, needs_native

__all__ = ["cpu"]
pytestmark = needs_native


@pytest.mark.parametrize(("bins", "levels"), [(4, 4), (6, 4), (12, 5), (100, 17), (1024, 64), (4096, 256)])
@pytest.mark.parametrize("kind", ["even", "random", "sparse", "peaked", "left", "empty"])
def test_codebook_is_the_same_to_the_last_bit(cpu: str, kind: str, bins: int, levels: int) -> None:
    x = (np.arange(bins) + 0.5) * 2 / bins - 1
    weights = {
        "even": np.ones(bins),
        "random": np.abs(noise((bins,), kind, bins).numpy()),
        "sparse": (noise((bins,), kind, bins).numpy() > 1) * 1.0,
        "peaked": np.exp(-((20 * x) ** 2)) * 1e6,
        "left": (x < 0) * np.exp(x),
        "empty": np.zeros(bins),
    }[kind]
    expected = codebook.optimal_levels(weights, levels)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            assert np.array_equal(calibration.optimal_levels(weights, levels), expected)
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1024, 100), (3, 70), (1, 100001), (4, 24, 64), (40, 513)], ids=str)
@pytest.mark.parametrize("block_size", [32, 256])
def test_histogram_is_the_same(cpu: str, dtype: torch.dtype, shape: tuple[int, ...], block_size: int) -> None:
    g = noise(shape, "g") * torch.exp(noise((shape[0], *[1] * (len(shape) - 1)), "rows"))
    g.view(-1)[:40] = 0
    g = g.to(dtype)
    expected = codebook.histogram(g, geometry(shape), block_size)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(calibration.histogram(g, geometry(shape), block_size), expected)
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "period"), [(32, 768, 48), (200, 1024, 64), (16, 4096, 128), (8, 6144, 1536), (64, 512, 0)]
)
def test_block_size_is_the_same(cpu: str, dtype: torch.dtype, rows: int, cols: int, period: int) -> None:
    g = (structured(rows, cols, period, "s") if period else noise((rows, cols), "flat")).to(dtype)
    view = geometry((rows, cols))
    assert blocks.block_size_from_scores(view.cols, calibration.block_scores(g, view)) == blocks.find_block_size(
        g, view
    )
