"""8-bit storage of a moment: scales, rounding, dither."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daypack import geometry as views
from daypack.calibration import codebook
from daypack.calibration.codebook import GRID
from daypack.formats.block_quantized import (
    DITHER_INDEX,
    DITHER_STEP,
    BlockQuantized,
    dither,
    round_up_to_bfloat16,
)
from daypack.geometry import chunks, geometry

EVERYTHING = (slice(None),) * 3


learned = lru_cache(lambda block_size: codebook.learn(torch.zeros(codebook.BINS), block_size))


def allocate(form, shape, dtype=torch.float32):
    view = geometry(shape)
    state = {"m" + spec.suffix: torch.zeros(spec.shape, dtype=spec.dtype) for spec in form.components(view, dtype)}
    state["m_codebook"].copy_(learned(form.block_size))
    return view, state


@given(st.lists(st.floats(0, 2.0**126, width=32), min_size=1, max_size=50))
@settings(deadline=None)
def test_scale_is_the_smallest_bfloat16_that_is_not_below(values):
    x = torch.tensor(values, dtype=torch.float32)
    up = round_up_to_bfloat16(x)
    assert up.dtype == torch.bfloat16
    assert (up.float() >= x).all()
    below = (up.view(torch.int16) - 1).view(torch.bfloat16).float()
    assert ((below < x) | (up == 0)).all()


@pytest.mark.parametrize("limit", [64, 1000, 1 << 19])
def test_dither_is_the_integer_sequence_it_is_documented_to_be(limit, monkeypatch):
    monkeypatch.setattr(views, "CHUNK_ELEMENTS", limit)
    view = geometry((3, 50, 41))
    index = np.arange(3 * 50 * 41, dtype=np.uint64).reshape(view.view3)
    for step in (1, 2, 10**6, 2**24 + 3):
        for chunk in chunks(view):
            expected = (index[chunk] * DITHER_INDEX + step * DITHER_STEP) % (1 << 32)
            got = dither(view, chunk, step, torch.empty(expected.shape))
            assert np.array_equal(got.numpy().view(np.uint32), expected)


@pytest.mark.parametrize("shift", [16, 0], ids=["level", "grid"])
def test_dither_runs_evenly_through_the_interval_over_elements_and_over_steps(shift):
    view = geometry((64, 64))
    like = torch.empty(view.view3)
    over_elements = dither(view, EVERYTHING, 5, like).flatten()
    over_steps = torch.stack([dither(view, EVERYTHING, t, like)[0, 3, 7] for t in range(1, 257)])
    for turns in (over_elements, over_steps):
        values = (turns.bitwise_right_shift(shift) & 0xFFFF) / 65536
        ideal = (torch.arange(len(values)) + 0.5) / len(values)
        assert (values.sort().values - ideal).abs().max() < 4 / len(values) ** 0.75  # random numbers: about 1 / sqrt(n)


def test_values_far_below_the_first_level_are_unbiased_too():
    """A twentieth of a grid point stays in the mean: rounding to the grid has a dither of its own."""
    form = BlockQuantized()
    view, state = allocate(form, (64, 256))
    value = torch.full(view.view3, 0.05 / GRID)
    value[..., 0] = 1.0
    mean = torch.zeros_like(value)
    for step in range(1, 513):
        form.encode_(state, "m", view, EVERYTHING, value, step)
        mean += form.decode(state, "m", view, EVERYTHING) / 512
    assert mean[..., 1:].mean().item() == pytest.approx(0.05 / GRID, rel=0.05)


@pytest.mark.parametrize("rounding", ["dithered", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 256), (5, 257), (4, 700), (4, 96, 80), (2, 3, 5, 7)])
@pytest.mark.parametrize("block", [64, 256])
def test_codes_are_neighbouring_levels_and_nearest_ones_the_nearest(rounding, dtype, shape, block):
    form = BlockQuantized(block, rounding)
    view, state = allocate(form, shape, dtype)
    torch.manual_seed(1)
    value = (torch.randn(view.view3, dtype=dtype) * torch.exp(2 * torch.randn(view.matrices, view.rows, 1))).to(dtype)
    form.encode_(state, "m", view, EVERYTHING, value, step=3)
    levels = state["m_codebook"].to(dtype)
    size = min(block, view.cols)
    for row, stored, codes in zip(
        value.view(-1, view.cols),
        state["m_scale"].view(-1, state["m_scale"].shape[-1]).to(dtype),
        state["m_codes"].view(-1, view.cols),
        strict=True,
    ):
        for part, scale, code in zip(row.split(size), stored, codes.split(size), strict=True):
            absmax = part.abs().max()
            assert absmax <= scale <= absmax * (1 + 2**-7)
            error = (levels[code.long()] - part / scale).abs()
            above = torch.searchsorted(levels, (part / scale).contiguous()).clamp(1, 255)
            gap = levels[above] - levels[above - 1]
            assert (error <= (gap if rounding == "dithered" else gap / 2) + 1e-6).all()
    decoded = form.decode(state, "m", view, EVERYTHING)
    assert decoded.dtype == dtype
    assert torch.equal(decoded[value.abs() == 0], value[value.abs() == 0])


def test_exact_levels_zero_and_extremes_are_kept():
    form = BlockQuantized()
    view, state = allocate(form, (1, 256))
    value = state["m_codebook"].view(1, 1, 256) * 0.5  # a power of two: exact in bf16
    for step in range(1, 50):
        form.encode_(state, "m", view, EVERYTHING, value, step)
        assert torch.equal(form.decode(state, "m", view, EVERYTHING), value)


def test_dithered_rounding_is_unbiased_where_nearest_is_not():
    bias = {}
    for rounding in ("dithered", "nearest"):
        form = BlockQuantized(rounding=rounding)
        view, state = allocate(form, (16, 512))
        value = torch.randn(view.view3, generator=torch.Generator().manual_seed(2))
        mean = torch.zeros_like(value)
        for step in range(1, 129):
            form.encode_(state, "m", view, EVERYTHING, value, step)
            mean += form.decode(state, "m", view, EVERYTHING) / 128
        bias[rounding] = float((mean - value).square().mean().sqrt())
    assert bias["dithered"] < 0.05 * bias["nearest"]


def test_a_small_moment_decays_to_zero_instead_of_standing_still():
    """Rounded to nearest, 0.9 times the smallest level is the smallest level again, for ever."""
    form = BlockQuantized()
    view, state = allocate(form, (8, 256))
    value = torch.full(view.view3, 1e-3)
    value[..., 0] = 1.0  # holds the block's scale up
    for step in range(1, 200):
        form.encode_(state, "m", view, EVERYTHING, value, step)
        value = form.decode(state, "m", view, EVERYTHING) * 0.9
        value[..., 0] = 1.0
    assert value[..., 1:].abs().mean() < 1e-5


def test_all_zero_block_next_to_a_live_one():
    form = BlockQuantized(4)
    view, state = allocate(form, (1, 8))
    value = torch.tensor([[[0.0, 0, 0, 0, 1, -2, 0, 3]]])
    form.encode_(state, "m", view, EVERYTHING, value, 1)
    assert state["m_scale"].tolist() == [[0.0, 3.0]]
    decoded = form.decode(state, "m", view, EVERYTHING)
    assert torch.equal(decoded == 0, value == 0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s["m_scale"].fill_(float("nan")), "m_scale holds"),
        (lambda s: s["m_scale"].neg_(), "m_scale holds"),
        (lambda s: s["m_codebook"].zero_(), "m_codebook is missing"),
        (lambda s: s["m_codebook"].copy_(s["m_codebook"].flip(0)), "m_codebook is not"),
        (lambda s: s["m_codebook"][100].copy_(s["m_codebook"][99] + codebook.MIN_GAP / 4), "m_codebook is not"),
    ],
)
def test_damage_is_found(damage, message):
    form = BlockQuantized()
    view, state = allocate(form, (4, 300))
    form.encode_(state, "m", view, EVERYTHING, torch.randn(view.view3), 1)
    assert form.fault(state, "m", view, squares=False) is None
    damage(state)
    assert message in form.fault(state, "m", view, squares=False)
