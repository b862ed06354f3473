"""Gefen against its textbook twin, step by step; its codebook and its block search against theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import daypack
from daypack.calibration.codebook import optimal_levels

from ..reference.gefen import (
    AdamW,
    Gefen,
    bf16_up,
    brute_force_error,
    codebook_error,
    find_block,
    matrices,
    optimal_error,
    row_shape,
)
from .scene import gradient, noise, parameters, structured, train, values

COMPRESSED: list[tuple[int, ...]] = [
    (24, 520),  # a ragged last block
    (16, 256),
    (7, 1009),  # prime rows
    (300, 48),  # rows shorter than a block
    (1, 4099),
    (8, 24, 40),  # experts
    (2, 3, 24, 48),
    (16, 16, 3, 3),  # convolution
    (64, 32, 1),
]
HYPER: list[dict[str, Any]] = [
    {"lr": 3e-3},
    {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3, "maximize": True, "block_size": 64},
    {"lr": 1e-2, "betas": (0.0, 0.99), "weight_decay": 0.0, "block_size": 100},
]


def scale_of(state: dict[str, Any], shape: tuple[int, ...]) -> Any:
    count, rows, _ = matrices(shape)
    stored = state["exp_avg_scale"]
    assert stored.shape[:-1] == row_shape(shape)
    return stored.double().numpy().reshape(count, rows, -1)


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
@pytest.mark.parametrize("hyper", HYPER, ids=["defaults", "all-changed", "no-beta1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_gefen_is_its_twin(hyper: dict[str, Any], second_moment: str, dtype: torch.dtype) -> None:
    params = parameters(dtype, {str(shape): shape for shape in COMPRESSED})
    optimizer = daypack.Gefen(params.values(), second_moment=second_moment, **hyper)
    twins: dict[str, Gefen] = {}
    for step in range(4):
        before = {name: p.double().numpy() for name, p in values(params).items()}
        train(optimizer, params, [step])
        for name, p in params.items():
            state = optimizer.state[p]
            if name not in twins:
                assert "exp_avg_codes" in state, f"{name} is not compressed"
                size = int(state.get("exp_avg_sq_block_size", 0))
                twins[name] = Gefen(tuple(p.shape), second_moment=second_moment, v_block=size, **hyper)
                if dtype == torch.float64:
                    twins[name].round_scale = lambda x: x
            follow(twins[name], p, state, before[name])


def follow(twin: Gefen, p: Parameter, state: dict[str, Any], before: Any) -> None:
    """One step of the twin beside one that the library just took; then on from the momentum that the library stored."""
    assert p.grad is not None
    exact = p.dtype == torch.float64
    tolerance = 1e-11 if exact else 2e-6
    expected, moment = twin.step(before, p.grad.double().numpy())
    found = p.detach().double().numpy()
    np.testing.assert_allclose(
        found, expected, tolerance, tolerance * np.abs(expected - before).max(), err_msg=str(p.shape)
    )

    levels = state["exp_avg_codebook"].double().numpy()
    codes = state["exp_avg_codes"].numpy()
    scale = scale_of(state, p.shape)
    # In fp32 the absmax itself may be an ulp off, and rounding up then lands on the next bf16 number.
    np.testing.assert_allclose(scale, moment.scale, rtol=1e-12 if exact else 2**-7)
    assert exact or (scale == moment.scale).mean() > 0.99
    ratio = np.divide(moment.scale, scale, out=np.zeros_like(scale), where=scale != 0)
    moment.scaled *= ratio.repeat(twin.block_size, 2)[:, :, : moment.scaled.shape[2]]
    allowed = moment.allows(codes.reshape(moment.scaled.shape), levels)
    assert allowed.all(), f"{p.shape}: {(~allowed).sum()} of {allowed.size} codes are not beside their value"
    twin.adopt(codes, scale, levels)
    for key, name in (("exp_avg_sq_row", "row"), ("exp_avg_sq_col", "col"), ("exp_avg_sq_block", "block")):
        if key in state:
            stored = state[key].double().numpy().reshape(twin.v[name].shape)
            np.testing.assert_allclose(stored, twin.v[name], rtol=1e-12 if exact else 1e-5, err_msg=str(p.shape))


@pytest.mark.parametrize("name", ["gefen", "adamw", "adam"])
@pytest.mark.parametrize("hyper", HYPER, ids=["defaults", "all-changed", "no-beta1"])
def test_vectors_take_the_textbook_step(name: str, hyper: dict[str, Any]) -> None:
    """0-d, 1-D and small parameters are plain AdamW (Adam for its namesake), in the same fp64 numbers."""
    options = {key: value for key, value in hyper.items() if key != "block_size"}
    shapes: dict[str, tuple[int, ...]] = {"vector": (700,), "one": (1,), "scalar": (), "thin": (3, 2)}
    params = parameters(torch.float64, shapes)
    optimizer = daypack.create(name, params.values(), **options)
    decay = optimizer.defaults["weight_decay"]
    twins = {n: AdamW(**{**options, "weight_decay": decay}, decoupled=name != "adam") for n in shapes}
    expected = {n: p.numpy() for n, p in values(params).items()}
    for step in range(5):
        train(optimizer, params, [step])
        for n, shape in shapes.items():
            expected[n] = twins[n].step(expected[n], gradient(n, shape, step).numpy())
            np.testing.assert_allclose(params[n].detach().numpy(), expected[n], rtol=1e-12, err_msg=n)


def test_scales_are_absmax_rounded_up() -> None:
    """In bf16 and never below the largest momentum of the block, so that no code is out of range."""
    p = Parameter(torch.zeros(64, 600))
    p.grad = gradient("p", p.shape, 0).float()
    daypack_optimizer = daypack.Gefen([p], betas=(0.0, 0.999))
    daypack_optimizer.step()
    scale = daypack_optimizer.state[p]["exp_avg_scale"]
    absmax = torch.stack([part.abs().amax(1) for part in p.grad.split(256, dim=1)], 1)
    assert scale.dtype == torch.bfloat16
    assert torch.all(scale.float() >= absmax)
    np.testing.assert_array_equal(scale.double().numpy(), bf16_up(absmax.double().numpy()))


def test_storage_keeps_exact_zeros_and_extremes() -> None:
    p = Parameter(torch.zeros(8, 512, dtype=torch.float64))
    p.grad = noise((8, 512), "g")
    p.grad[:, 100:300] = 0
    p.grad[3, 256:] = 0  # a block without anything
    optimizer = daypack.Gefen([p], betas=(0.0, 0.999))
    optimizer.step()
    state = optimizer.state[p]
    levels = state["exp_avg_codebook"].double()
    assert state["exp_avg_scale"][3, 1] == 0
    decoded = levels[state["exp_avg_codes"].long()] * state["exp_avg_scale"].repeat_interleave(256, 1)
    assert torch.all(decoded[p.grad == 0] == 0)
    for block in range(2):
        part = slice(256 * block, 256 * (block + 1))
        largest = p.grad[:, part].abs().argmax(1, keepdim=True)
        assert torch.equal(decoded[:, part].gather(1, largest), p.grad[:, part].gather(1, largest))


def test_factored_second_moment_is_exact_for_rank_one() -> None:
    """Where g^2 is an outer product, only the rounding of the stored momentum parts Gefen from AdamW."""
    shape = (40, 700)
    outer = torch.exp(noise((40, 1), "r")) * torch.exp(0.3 * noise((1, 700), "c"))
    p, q = (Parameter(torch.zeros(shape, dtype=torch.float64)) for _ in range(2))
    ours, theirs = daypack.Gefen([p], weight_decay=0.0), torch.optim.AdamW([q], weight_decay=0.0)
    for step in range(12):
        before = p.detach().clone(), q.detach().clone()
        p.grad = outer * noise(shape, "sign", step).sign() * (1 + step % 3)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        update, wanted = p.detach() - before[0], q.detach() - before[1]
        error = (update - wanted).norm() / wanted.norm()
        assert error < (1e-12 if step == 0 else 0.03), (step, error)


def test_codebook_is_learned_optimally_from_the_first_gradient() -> None:
    """Read from the state: 256 rising levels with -1, 0 and 1, as good as the exact optimum for the data it saw."""
    p = Parameter(torch.zeros(512, 4096))
    p.grad = noise(p.shape, "student").float() / (0.3 + noise(p.shape, "tail").float().abs())  # heavy tails
    optimizer = daypack.Gefen([p])
    optimizer.step()
    levels = optimizer.state[p]["exp_avg_codebook"].double().numpy()
    assert len(levels) == 256
    assert np.all(np.diff(levels) > 0)
    assert {-1.0, 0.0, 1.0} <= set(levels.tolist())
    scaled = p.grad.reshape(512, 16, 256)
    scaled = scaled / scaled.abs().amax(2, keepdim=True)
    weights = torch.histc(scaled, 4096, -1, 1).double().numpy()
    # The prior of 65,536 counts beside these 2 M counts may cost a little.
    assert codebook_error(weights, levels) <= 1.01 * codebook_error(weights, optimal_levels(weights, 256))


@pytest.mark.parametrize("levels", [3, 4, 5, 6, 7])
def test_codebook_search_equals_brute_force(levels: int) -> None:
    for seed in range(12):
        weights = noise((12,), "histogram", seed).abs().numpy()
        weights[noise((12,), "zeros", seed).numpy() > 0.5] = 0
        if seed == 0:
            weights[:6] = 0  # one half is empty
        found = optimal_levels(weights, levels)
        assert len(found) == levels
        assert {-1.0, 0.0, 1.0} <= set(found.tolist())
        best = brute_force_error(weights, levels)
        assert abs(best - optimal_error(weights, levels)) <= 1e-12  # the two textbook ways agree
        assert abs(codebook_error(weights, found) - best) <= 1e-12, (seed, found)


@pytest.mark.parametrize("kind", ["normal", "heavy", "skewed", "sparse"])
def test_codebook_search_equals_the_quadratic_programme(kind: str) -> None:
    bins, levels = {"normal": (4096, 256)}.get(kind, (1024, 64))
    x = (np.arange(bins) + 0.5) * 2 / bins - 1
    weights = {
        "normal": np.exp(-((4 * np.abs(x)) ** 2) / 2),
        "heavy": 1 / (1e-3 + x**2),
        "skewed": np.exp(-3 * x) * (1 + np.sin(40 * x)),
        "sparse": (noise((bins,), "sparse").numpy() > 1.5) * 1.0,
    }[kind]
    found = optimal_levels(weights, levels)
    best = optimal_error(weights, levels)
    assert np.all(np.diff(found) > 0)
    assert codebook_error(weights, found) <= best * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("rows", "cols", "period"),
    [(32, 768, 48), (32, 768, 96), (16, 1024, 64), (16, 4096, 128), (8, 6144, 1536), (64, 512, 0), (16, 1040, 0)],
)
def test_block_size_is_found_as_in_the_textbook(rows: int, cols: int, period: int) -> None:
    g = structured(rows, cols, period, "s") if period else noise((rows, cols), "flat", cols)
    p = Parameter(torch.zeros(rows, cols, dtype=torch.float64))
    p.grad = g
    optimizer = daypack.Gefen([p], second_moment="blocks")
    optimizer.step()
    found = optimizer.state[p]["exp_avg_sq_block_size"]
    assert found == find_block(g.numpy())
    if 0 < period <= 1024:
        assert found == period
    assert optimizer.state[p]["exp_avg_sq_block"].shape == (rows, -(-cols // found))


def test_block_size_of_a_row_without_divisors() -> None:
    p = Parameter(torch.zeros(16, 1009, dtype=torch.float64))
    p.grad = noise(p.shape, "g")
    optimizer = daypack.Gefen([p], second_moment="blocks")
    optimizer.step()
    assert optimizer.state[p]["exp_avg_sq_block_size"] == 256
    assert optimizer.state[p]["exp_avg_sq_block"].shape == (16, 4)
