"""Adafactor against numpy in fp64, and against torch's own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack

from ..conformance.scene import noise
from ..reference.layerwise import Adafactor as Twin

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "clipped": {"d": 1.0, "beta2_decay": -0.5, "eps": (1e-6, 1e-2)},
    "explicit rate": {"lr": 3e-3, "relative_step": False, "scale_parameter": False},
    "momentum": {"beta1": 0.9},
}


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    rows = torch.exp(noise((shape[0], *(1,) * (len(shape) - 1)), "rows"))
    # A late outlier makes the RMS clipping bite.
    return rows * noise(shape, "g", step) * (30.0 if step == 5 else 1.0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(40, 24), (7, 130), (50,), (1, 30), (30, 1)], ids=str)
def test_follows_the_paper_in_double_precision(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    p = Parameter(noise(shape, "p"))
    optimizer, twin, expected = daypack.Adafactor([p], **options), Twin(**options), p.detach().numpy().copy()
    for step in range(8):
        p.grad = gradient(shape, step)
        optimizer.step()
        expected = twin.step(expected, p.grad.numpy())
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("options", list(OPTIONS.values())[:3], ids=list(OPTIONS)[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (7, 130), (50,), (1, 30)], ids=str)
def test_equals_torch_on_matrices_and_vectors(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """To rounding, where the mean of g^2 is above torch's eps[0]; smaller gradients are the next test."""
    p, q = (Parameter(noise(shape, "p").to(dtype)) for _ in range(2))
    ours, theirs = daypack.Adafactor([p], **options), torch.optim.Adafactor([q], **options)
    for step in range(8):
        p.grad = q.grad = gradient(shape, step).to(dtype)
        ours.step()
        theirs.step()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def test_differs_from_torch_where_gradients_are_small() -> None:
    """The second moment of g = 1e-5 is 1e-10; torch divides by eps[0] = 1.2e-7 where the mean is below it.

    Scaled gradients are then another second moment there, and the same one here: the update is g over its own size.
    """
    moved = {}
    for cls in (daypack.Adafactor, torch.optim.Adafactor):
        for size in (1.0, 1e-5):
            p = Parameter(torch.ones(40, 24))
            optimizer = cls([p], d=1e3)  # without clipping, which hides it
            p.grad = size * noise(p.shape, "g").float()
            optimizer.step()
            moved[cls.__module__.split(".")[0], size] = (1 - p.detach()).norm()
    torch.testing.assert_close(moved["daypack", 1e-5], moved["daypack", 1.0], rtol=1e-4, atol=0)
    torch.testing.assert_close(moved["daypack", 1.0], moved["torch", 1.0], rtol=1e-4, atol=0)
    assert moved["torch", 1e-5] > 10 * moved["torch", 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_moves_by_the_rate(dtype: torch.dtype) -> None:
    """(1e-4)^2 and eps vanish in fp16; torch's eps of bf16 would hide a gradient of 1e-4 altogether."""
    p = Parameter(torch.ones(32, 16, dtype=dtype))
    p.grad = torch.full_like(p, 1e-4)
    daypack.Adafactor([p], lr=5e-2).step()
    torch.testing.assert_close(p.detach().float(), torch.full((32, 16), 0.95), rtol=0, atol=4e-3)


def test_an_explicit_rate_is_honoured() -> None:
    p, q = Parameter(torch.zeros(16, 8)), Parameter(torch.full((16, 8), 9.0))
    optimizer = daypack.Adafactor([p, q], lr=0.25, relative_step=False, scale_parameter=False)
    for _ in range(100):
        before = p.detach().clone(), q.detach().clone()
        p.grad, q.grad = torch.ones(16, 8), torch.ones(16, 8)
        optimizer.step()
        for new, old in zip((p, q), before, strict=True):
            torch.testing.assert_close(old - new.detach(), torch.full((16, 8), 0.25))


def test_zero_parameters_still_move_with_scaled_steps() -> None:
    p = Parameter(torch.zeros(16, 8))
    p.grad = torch.ones(16, 8)
    daypack.Adafactor([p], lr=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((16, 8), -0.5e-3))


def test_momentum_carries_no_old_rate() -> None:
    """It averages directions: a rate of 0 stops the parameter at once, a later one scales all of it."""
    p = Parameter(torch.ones(16, 8))
    optimizer = daypack.Adafactor([p], lr=1.0, beta1=0.9, relative_step=False, scale_parameter=False)
    p.grad = torch.ones(16, 8)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((16, 8), 0.9))
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((16, 8), 0.9 - 0.19e-3))


@pytest.mark.parametrize("bits", [32, 8])
def test_momentum_of_either_kind_follows_the_exact_one(bits: int) -> None:
    p = Parameter(noise((64, 300), "p").float())
    optimizer, twin, expected = (
        daypack.Adafactor([p], beta1=0.9, bits=bits),
        Twin(beta1=0.9),
        p.detach().double().numpy(),
    )
    start = expected
    for step in range(12):
        p.grad = gradient(tuple(p.shape), step).float()
        optimizer.step()
        expected = twin.step(expected, p.grad.double().numpy())
    error = np.linalg.norm(p.detach().double().numpy() - expected) / np.linalg.norm(expected - start)
    assert error < (1e-5 if bits == 32 else 1e-2)
    assert ("exp_avg_codes" in optimizer.state[p]) == (bits == 8)


def test_state_of_a_square_matrix_is_32_kib() -> None:
    p = Parameter(torch.empty(4096, 4096))
    optimizer = daypack.Adafactor([p])
    daypack.materialize_state(optimizer)
    assert daypack.state_report(optimizer).total_bytes == 2 * 4096 * 4 + 4


@pytest.mark.parametrize("shape", [(8, 3, 7, 5), (6, 24, 80), (2, 3, 4, 5, 6), (9, 4, 3)], ids=str)
def test_more_dims_follow_the_matrices_of_our_geometry(shape: tuple[int, ...]) -> None:
    """[d0, rest], or each matrix of the last two dims; v is exact where g^2 has rank one in that reading."""
    p = Parameter(noise(shape, "p"))
    optimizer = daypack.Adafactor([p], scale_parameter=False)
    row = torch.exp(noise((shape[0], *(1,) * (len(shape) - 1)), "r"))
    last = torch.exp(noise((shape[-1],), "c"))
    g = row * last * noise(shape, "sign").sign()
    before, p.grad = p.detach().clone(), g
    optimizer.step()
    torch.testing.assert_close((before - p.detach()).abs(), torch.full(shape, 1e-2, dtype=torch.float64))


def test_state_of_another_shape_is_refused() -> None:
    p, q = Parameter(torch.ones(16, 320)), Parameter(torch.ones(320, 16))
    first, second = daypack.Adafactor([("w", p)]), daypack.Adafactor([("w", q)])
    p.grad, q.grad = torch.ones(16, 320), torch.ones(320, 16)
    first.step()
    with pytest.raises(
        ValueError, match=r"parameter w \(shape \(320, 16\)\) .*exp_avg_sq_row is float32 of shape \(16,\)"
    ):
        second.load_state_dict(first.state_dict())


def test_flat_partitions_are_warned_of_once() -> None:
    flat = torch.ones(4096, requires_grad=True)  # as ZeRO hands over
    flat.grad = torch.ones(4096)
    optimizer = daypack.Adafactor([flat])
    with pytest.warns(UserWarning, match="norm of the partition") as caught:
        optimizer.step()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


IMPOSSIBLE: tuple[tuple[str, Any], ...] = (
    ("d", 0.5),
    ("beta2_decay", 0.1),
    ("eps", 1e-8),
    ("eps", (0.0, 1e-3)),
    ("eps", (None, -1.0)),
    ("beta1", 1.0),
    ("relative_step", 1),
    ("bits", 4),
)


@pytest.mark.parametrize(("option", "value"), IMPOSSIBLE, ids=str)
def test_impossible_options_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        daypack.Adafactor([Parameter(torch.ones(2))], **{option: value})
