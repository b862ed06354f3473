"""AdEMAMix against numpy in fp64: three moments, and the warm-ups of alpha and beta3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import daypack
from daypack.rules import ademamix

from ..conformance.scene import noise
from ..reference.ademamix import AdEMAMix as Twin

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "warm-ups": {"alpha_warmup": 5, "beta3_warmup": 6, "weight_decay": 0.2, "lr": 1e-2},
    "all changed": {"betas": (0.8, 0.9, 0.99), "alpha": 2.0, "eps": 1e-2, "maximize": True, "beta3_warmup": 3},
    "no first average": {"betas": (0.0, 0.9, 0.99), "beta3_warmup": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("second_moment", ["dense", "factored"])
@pytest.mark.parametrize("shape", [(40, 24), (24, 300), (50,), ()], ids=str)
def test_follows_the_paper_in_double_precision(
    shape: tuple[int, ...], second_moment: Any, options: dict[str, Any]
) -> None:
    p = Parameter(noise(shape, "p"))
    options = {"weight_decay": 0.0, **options}
    optimizer = daypack.AdEMAMix([p], bits=32, second_moment=second_moment, **options)
    twin = Twin(**options, factored=second_moment == "factored" and len(shape) > 1)
    expected = p.detach().numpy().copy()
    for step in range(8):
        p.grad = noise(shape, "g", step)
        optimizer.step()
        expected = twin.step(expected, p.grad.numpy())
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-11, atol=1e-13)


def test_without_the_slow_average_it_is_adamw() -> None:
    p, q = (Parameter(noise((24, 40), "p").float()) for _ in range(2))
    ours = daypack.AdEMAMix([p], lr=1e-2, alpha=0.0, bits=32, second_moment="dense")
    theirs = torch.optim.AdamW([q], lr=1e-2)
    for step in range(10):
        p.grad = q.grad = noise((24, 40), "g", step).float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_conversion_keeps_what_both_averages_stand_for() -> None:
    """To other decays of the same rule: the unbiased means stay, the slow one through its warm-up."""
    options = {"betas": (0.9, 0.999, 0.9999), "alpha_warmup": 4, "beta3_warmup": 9, "bits": 32}
    p, steady = Parameter(noise((24, 40), "p").float()), noise((24, 40), "g").float()
    old = daypack.AdEMAMix([("p", p)], second_moment="dense", **options)
    for _ in range(7):
        p.grad = steady.clone()
        old.step()
    scale = ademamix.ADEMAMIX.moment("exp_avg_slow").meaning.scale
    mean = old.state[p]["exp_avg_slow"] * scale(old.param_groups[0], 7)
    torch.testing.assert_close(mean, steady, rtol=1e-5, atol=1e-6)
    new = daypack.convert(old, "ademamix", betas=(0.8, 0.99, 0.999), bits=8)
    assert {(e.moment, e.outcome) for e in new.conversion.entries} == {
        ("exp_avg", "requantised"),
        ("exp_avg_slow", "requantised"),
        ("exp_avg_sq", "requantised"),
    }
    again = daypack.convert(new, "ademamix", bits=32)
    for name in ("exp_avg", "exp_avg_slow"):
        rule, group = ademamix.ADEMAMIX.moment(name), again.param_groups[0]
        mean = again.state[p][name] * rule.meaning.scale(group, 7)
        assert (mean - steady).norm() < 0.02 * steady.norm()
