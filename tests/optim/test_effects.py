"""No dead options: every documented option of the whole-tensor and low-rank optimizers changes the outcome."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import daypack

from ..conformance.scene import noise

COMMON: tuple[dict[str, Any], ...] = ({"lr": 0.02}, {"weight_decay": 0.5}, {"maximize": True})
ADAMW: tuple[dict[str, Any], ...] = ({"betas": (0.8, 0.999)}, {"betas": (0.9, 0.99)}, {"eps": 1e-2})
EFFECTS: dict[str, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "adafactor": (
        {"beta1": 0.9, "bits": 8, "lr": 2.0},
        (
            *COMMON,
            {"beta2_decay": -0.5},
            {"eps": (1.0, 1e-3)},
            {"eps": (None, 10.0)},
            {"d": 2.0},
            {"beta1": None},
            {"beta1": 0.5},
            {"bits": 32},
            {"block_size": 64},
            {"relative_step": False},
            {"scale_parameter": False},
        ),
    ),
    "lamb": (
        {"bits": 8},
        (
            *COMMON,
            *ADAMW,
            {"trust_ratio": False},
            {"bits": 32},
            {"second_moment": "factored"},
            {"block_size": 64},
        ),
    ),
    "galore": (
        {"rank": 2, "update_proj_gap": 2},
        (
            *COMMON,
            *ADAMW,
            {"inner": "gefen"},
            {"inner": "gefen", "inner_options": {"block_size": 32}},
            {"rank": 3},
            {"rank": None},
            {"update_proj_gap": 3},
            {"scale": 0.5},
        ),
    ),
    "adopt": ({}, (*COMMON, *ADAMW[:2], {"eps": 2.0}, {"bits": 32}, {"second_moment": "dense"}, {"block_size": 64})),
    "ademamix": (
        {"alpha_warmup": 3},
        (
            *COMMON,
            {"betas": (0.8, 0.999, 0.9999)},
            {"betas": (0.9, 0.99, 0.9999)},
            {"betas": (0.9, 0.999, 0.99)},
            {"eps": 1e-2},
            {"alpha": 50.0},
            {"alpha_warmup": None, "alpha": 60.0},
            {"beta3_warmup": 3},
            {"bits": 32},
            {"second_moment": "dense"},
            {"block_size": 64},
        ),
    ),
    "muon": (
        {},
        (
            *COMMON,
            {"momentum": 0.8},
            {"nesterov": False},
            {"ns_coefficients": (2.0, -1.5, 0.5)},
            {"ns_steps": 3},
            {"eps": 1e4},
            {"adjust_lr_fn": "original"},
            {"ns_dtype": "float32"},
            {"use_muon": False},
            {"use_muon": False, "beside": "adamw"},
            {"use_muon": False, "beside_options": {"betas": (0.8, 0.9)}},
            {"bits": 32},
            {"block_size": 64},
        ),
    ),
}


def outcome(name: str, options: dict[str, Any]) -> torch.Tensor:
    p = Parameter(noise((24, 320), "p").float())
    optimizer = daypack.create(name, [p], **options)
    for step in range(4):
        p.grad = (torch.exp(noise((24, 1), "rows")) * noise((24, 320), "g", step)).float()
        if step == 2:
            p.grad[0] *= 30  # an outlier to clip
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("name", EFFECTS)
def test_every_option_has_an_effect(name: str) -> None:
    base, effects = EFFECTS[name]
    results = [outcome(name, base), *(outcome(name, {**base, **change}) for change in effects)]
    for i, (result, change) in enumerate(zip(results[1:], effects, strict=True)):
        others = [other for j, other in enumerate(results) if j != i + 1]
        assert not any(torch.equal(result, other) for other in others), change
