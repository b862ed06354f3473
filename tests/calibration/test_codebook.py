"""The learned codebook: its histogram, its prior, and what it is worth. Optimality is tested in tests/conformance."""

import numpy as np
import pytest
import torch

from daypack import geometry as views
from daypack.calibration import codebook
from daypack.geometry import geometry


@pytest.mark.parametrize("shape", [(7, 300), (3, 5), (4, 96, 80), (1, 2000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("limit", [256, 1 << 19])
def test_histogram_counts_every_nonzero_element_once(shape, dtype, limit, monkeypatch):
    monkeypatch.setattr(views, "CHUNK_ELEMENTS", limit)
    torch.manual_seed(0)
    grad = torch.randn(shape).to(dtype)
    grad.view(-1)[::3] = 0
    view = geometry(shape)
    counts = codebook.histogram(grad, view, 64).numpy()
    expected = np.zeros(codebook.BINS, np.int64)
    for row in grad.float().numpy().reshape(-1, view.cols):
        for part in np.split(row, range(64, view.cols, 64)):
            if part.any():
                unit = part[part != 0] / np.abs(part).max()
                np.add.at(expected, np.minimum(((unit + 1) * 2048).astype(int), 4095), 1)
    assert counts.sum() == (grad != 0).sum()
    assert np.abs(np.cumsum(counts - expected)).max() <= 2  # fp32 may put an element on a bin's edge on the other side


def test_histogram_of_zeros_is_empty():
    assert codebook.histogram(torch.zeros(4, 70), geometry((4, 70)), 64).sum() == 0


@pytest.mark.parametrize("block", [1, 2, 16, 64, 256])
def test_prior_is_the_distribution_of_normalised_gaussians(block):
    generator = np.random.default_rng(0)
    z = generator.standard_normal((400_000 // block, block))
    unit = z / np.abs(z).max(1, keepdims=True)
    inner = unit[np.abs(unit) < 1]
    prior = codebook.gaussian_prior(block)
    assert prior.sum() == pytest.approx(1 - 1 / block, abs=1e-9)
    assert np.allclose(prior, prior[::-1])
    sampled = np.histogram(inner, bins=64, range=(-1, 1))[0] / unit.size
    assert np.abs(sampled - prior.reshape(64, -1).sum(1)).max() < 4 * np.sqrt(1 / 64 / unit.size) + 1e-4


def test_codebook_from_few_gradients_is_nearly_as_good_as_from_many():
    """Without the prior, 64 elements would leave most levels meaningless."""
    generator = np.random.default_rng(1)

    def error(levels, unit):
        levels = levels.double().numpy()
        nearest = np.abs(unit[:, None] - levels[None]).min(1)
        return np.square(nearest).mean()

    z = generator.standard_normal((2000, 256))
    unit = (z / np.abs(z).max(1, keepdims=True)).ravel()[::16]
    few = codebook.learn(codebook.histogram(torch.randn(1, 64), geometry((1, 64)), 256), 256)
    many = codebook.learn(codebook.histogram(torch.from_numpy(z).float(), geometry(z.shape), 256), 256)
    assert error(few, unit) < 1.03 * error(many, unit)


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "one value", "one-sided", "nothing"])
def test_every_codebook_keeps_the_contract(kind):
    torch.manual_seed(0)
    values = {
        "gaussian": torch.randn(64, 256),
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((64, 256)),
        "one value": torch.full((64, 256), -3.0),
        "one-sided": torch.rand(64, 256),
        "nothing": torch.zeros(64, 256),
    }[kind]
    levels = codebook.learn(codebook.histogram(values, geometry((64, 256)), 256), 256)
    assert levels.shape == (256,)
    assert levels.dtype == torch.float32
    assert levels[0] == -1
    assert levels[-1] == 1
    assert (levels == 0).sum() == 1
    assert (levels.diff() >= codebook.MIN_GAP).all()


def test_a_histogram_with_few_used_bins_still_gives_distinct_levels():
    weights = np.zeros(4096)
    weights[[10, 2000, 3000, 4090]] = 5.0
    levels = codebook.optimal_levels(weights, 256)
    assert len(levels) == 256
    assert (np.diff(levels) > 0).all()
    centres = (np.arange(4096) + 0.5) / 2048 - 1
    for bin_ in (10, 2000, 3000, 4090):
        assert np.abs(levels - centres[bin_]).min() < 1e-12
