"""Muon against numpy in fp64 and against torch's; what it leaves to the optimizer beside it, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import daypack
from daypack.optim.muon import head_names

from ..conformance.scene import noise
from ..reference.muon import Muon as Twin

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "original": {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.8},
    "all changed": {
        "weight_decay": 0.3,
        "lr": 1e-2,
        "maximize": True,
        "ns_steps": 3,
        "ns_coefficients": (2.0, -1.5, 0.5),
    },
    "large eps": {"eps": 100.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(40, 24), (24, 300), (1, 9), (9, 1), (16, 3, 3, 3)], ids=str)
def test_follows_the_paper_in_double_precision(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    p = Parameter(noise(shape, "p"))
    options = {"adjust_lr_fn": "match_rms_adamw", **options}
    optimizer, twin = daypack.Muon([p], bits=32, **options), Twin(**options)
    expected = p.detach().numpy().reshape(shape[0], -1).copy()
    for step in range(6):
        p.grad = noise(shape, "g", step)
        optimizer.step()
        expected = twin.step(expected, p.grad.numpy().reshape(shape[0], -1))
        np.testing.assert_allclose(p.detach().numpy().reshape(shape[0], -1), expected, rtol=1e-10, atol=1e-12)


def test_stacked_experts_are_matrices_of_their_own() -> None:
    p, alone = Parameter(noise((3, 40, 24), "p")), [Parameter(noise((3, 40, 24), "p")[i]) for i in range(3)]
    together, apart = daypack.Muon([p], bits=32), daypack.Muon(alone, bits=32)
    for step in range(3):
        p.grad = noise((3, 40, 24), "g", step)
        for i, q in enumerate(alone):
            q.grad = p.grad[i]
        together.step()
        apart.step()
    torch.testing.assert_close(p.detach(), torch.stack([q.detach() for q in alone]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 160)], ids=str)
def test_is_as_torchs(shape: tuple[int, ...], adjust: Any, ns_dtype: Any) -> None:
    """torch's Newton-Schulz is in bf16: both differ from the exact one by what that rounds."""
    p, q = (Parameter(noise(shape, "p").float()) for _ in range(2))
    start = p.detach().clone()
    ours = daypack.Muon([p], lr=1e-2, bits=32, adjust_lr_fn=adjust, ns_dtype=ns_dtype)
    theirs = torch.optim.Muon([q], lr=1e-2, adjust_lr_fn=adjust)
    for step in range(5):
        p.grad = q.grad = noise(shape, "g", step).float()
        ours.step()
        theirs.step()
    assert (p - q).norm() < 0.03 * (q - start).norm()


def test_eight_bit_momentum_moves_like_the_whole_one() -> None:
    p, q = (Parameter(noise((96, 256), "p").float()) for _ in range(2))
    start = p.detach().clone()
    coded, whole = daypack.Muon([p], ns_dtype="float32"), daypack.Muon([q], bits=32, ns_dtype="float32")
    for step in range(20):
        p.grad = q.grad = noise((96, 256), "g", step).float() + noise((96, 256), "mean").float()
        coded.step()
        whole.step()
    assert (p - q).norm() < 0.02 * (q - start).norm()
    assert sum(v.nbytes for v in coded.state[p].values()) < 1.05 * p.numel() + 2048


class Small(nn.Module):
    def __init__(self, head: str = "lm_head", tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.conv = nn.Conv1d(32, 16, 3)
        setattr(self, head, nn.Linear(16, 50, bias=False))
        if tied:
            getattr(self, head).weight = self.embed.weight


def rules_of(optimizer: Any) -> dict[str, str]:
    return {
        name: optimizer.plan_of(p, group, name).rule.name
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }


@pytest.mark.parametrize("whole", [True, False], ids=["model", "groups"])
def test_hidden_matrices_are_found_from_the_model(whole: bool) -> None:
    model = Small()
    optimizer = daypack.Muon(model if whole else daypack.param_groups(model))
    found = rules_of(optimizer)
    assert {name for name, rule in found.items() if rule == "muon"} == {"up.weight", "conv.weight"}
    assert set(found.values()) == {"muon", "adamw"}
    assert optimizer.param_groups[0]["rule"] == "muon"
    assert head_names(model) == ("lm_head.weight",)
    assert rules_of(daypack.Muon(daypack.param_groups(Small(tied=True))))["embed.weight"] == "adamw"


def test_groups_and_names_leave_parameters_to_the_optimizer_beside() -> None:
    model = Small("out")
    named = dict(model.named_parameters())
    groups = [
        {"params": [("embed.weight", named["embed.weight"])], "use_muon": False},
        {"params": [(name, named[name]) for name in ("up.weight", "up.bias", "out.weight")]},
    ]
    optimizer = daypack.Muon(groups, beside_names=["out.*"], beside="adamw8bit", beside_options={"betas": (0.8, 0.9)})
    assert rules_of(optimizer) == {
        "embed.weight": "adamw",
        "up.weight": "muon",
        "up.bias": "adamw",
        "out.weight": "adamw",
    }
    plan = optimizer.plan_of(named["up.bias"], optimizer.param_groups[1], "up.bias")
    assert plan.rule.at(optimizer.param_groups[1], 1).beta1 == 0.8


@pytest.mark.parametrize("beside", ["gefen", "adamw", "adamw8bit", "lion8bit"])
def test_the_optimizer_beside_does_what_it_does_alone(beside: str) -> None:
    shapes = {"matrix": (40, 300), "vector": (30,)}
    ours, alone = ({n: Parameter(noise(s, n).float()) for n, s in shapes.items()} for _ in range(2))
    one = daypack.Muon([{"params": ours.values(), "use_muon": False}], lr=1e-3, weight_decay=0.1, beside=beside)
    other = daypack.create(beside, alone.values(), lr=1e-3, weight_decay=0.1)
    for step in range(4):
        for n, s in shapes.items():
            ours[n].grad = alone[n].grad = noise(s, n, step).float()
        one.step()
        other.step()
    for n in shapes:
        torch.testing.assert_close(ours[n], alone[n], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beside": "muon"}, "it is this optimizer"),
        ({"beside": "galore"}, "does not fit"),
        ({"beside": "sgd"}, "beside of Muon must be"),
        ({"beside_options": {"lr": 1.0}}, "must not hold 'lr'"),
        ({"beside_options": {"bogus": 1}}, "do not fit 'gefen'"),
        ({"beside_names": ["nothing.*"]}, "matches no parameter"),
        ({"beside_names": "lm_head"}, "must be a list of patterns"),
        ({"momentum": 1.0}, r"must lie in \[0, 1\)"),
        ({"ns_coefficients": (1.0, 2.0)}, "must be three numbers"),
        ({"ns_steps": 0}, "positive whole number"),
        ({"adjust_lr_fn": None}, "must be 'match_rms_adamw' or 'original'"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        daypack.Muon(Small().named_parameters(), **options)
