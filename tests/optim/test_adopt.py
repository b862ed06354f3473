"""ADOPT against numpy in fp64; what its first step does, and that its direction reads the second moment from before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import daypack

from ..conformance.scene import noise
from ..reference.adopt import Adopt as Twin

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.2, "lr": 1e-2},
    "all changed": {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-2, "maximize": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("second_moment", ["dense", "factored"])
@pytest.mark.parametrize("shape", [(40, 24), (24, 300), (50,), ()], ids=str)
def test_follows_the_paper_in_double_precision(
    shape: tuple[int, ...], second_moment: Any, options: dict[str, Any]
) -> None:
    p = Parameter(noise(shape, "p"))
    optimizer = daypack.ADOPT([p], bits=32, second_moment=second_moment, **options)
    twin = Twin(**options, factored=second_moment == "factored" and len(shape) > 1)
    expected = p.detach().numpy().copy()
    for step in range(8):
        p.grad = noise(shape, "g", step) * 10.0**step  # growing, so that clipping matters
        optimizer.step()
        expected = twin.step(expected, p.grad.numpy())
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-11, atol=1e-13)


def test_first_step_moves_nothing_and_takes_in_the_second_moment() -> None:
    p = Parameter(noise((16, 64), "p").float())
    before, optimizer = p.detach().clone(), daypack.ADOPT([p], lr=0.1, weight_decay=0.5, second_moment="dense")
    p.grad = noise((16, 64), "g").float()
    optimizer.step()
    assert torch.equal(p.detach(), before)
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], p.grad.square())
    assert optimizer.state[p]["step"] == 1
    optimizer.step()  # the same gradient: every element moves by a tenth of the rate, as m is a tenth of it
    torch.testing.assert_close((before * (1 - 0.05) - p.detach()).abs(), torch.full_like(p, 0.01), rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("second_moment", ["dense", "factored"])
def test_an_outlier_moves_its_parameter_by_the_clip_at_most(second_moment: Any) -> None:
    """The published property: a gradient enters divided by a second moment that has not seen it, clipped to t^(1/4)."""
    p = Parameter(torch.zeros(64, 64))
    optimizer = daypack.ADOPT([p], lr=1e-3, second_moment=second_moment)
    for step in range(17):
        p.grad = 1e-3 * noise((64, 64), "g", step).float()
        if step == 16:
            p.grad[3, 5] = 1e5
            before = p.detach().clone()
        optimizer.step()
    moved = (p.detach() - before).abs() / 1e-3
    assert moved.max() <= 0.1 * 16**0.25 + 0.9 * 2
    assert moved[3, 5] > 0.15
