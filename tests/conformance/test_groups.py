"""`daypack.param_groups`: what decays is decided by module type and dimension, and every parameter is listed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import daypack

from .scene import assert_same, set_gradients, values
from .specs import Case, crossed


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(size))


class Mixer(nn.Module):
    """A state-space block: matrices that must not decay."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(32, 16))
        self.dt_bias = nn.Parameter(torch.zeros(32))
        self.conv1d = nn.Conv1d(32, 32, 4, groups=32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.ln_1, self.ln_f, self.q_norm = nn.LayerNorm(32), nn.LayerNorm(32), RMSNorm(32)
        self.batch = nn.BatchNorm1d(32)
        self.group = nn.GroupNorm(4, 32)
        self.value_embeds = nn.Linear(32, 32)  # A name that sounds like an embedding.
        self.normaliser = nn.Linear(32, 16, bias=False)  # A name that sounds like a norm.
        self.mixer = Mixer()
        self.lora_A, self.lora_B = nn.Parameter(torch.zeros(4, 32)), nn.Parameter(torch.zeros(32, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.experts = nn.Parameter(torch.zeros(4, 32, 8))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight


DECAYED = {
    "value_embeds.weight",
    "normaliser.weight",
    "mixer.conv1d.weight",
    "lora_A",
    "lora_B",
    "experts",
    "tokens.weight",
}


def listed(groups: Any) -> dict[str, dict[str, Any]]:
    """Group by parameter name."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name, p in group["params"]:
            assert isinstance(p, nn.Parameter)
            assert name not in found
            found[name] = group
    return found


def test_what_decays_and_what_does_not() -> None:
    model = Model()
    groups = daypack.param_groups(model, weight_decay=0.3)
    found = listed(groups)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == trainable  # The tied head once, under its first name; nothing frozen.
    for name, group in found.items():
        if name == "tokens.weight":
            assert group["embedding"] is True
            continue
        assert not group["embedding"], name
        assert group["weight_decay"] == (0.3 if name in DECAYED else 0.0), name
    report = str(groups)
    assert all(name in report for name in trainable)


def test_order_is_the_models_and_repeats() -> None:
    model = Model()
    first, second = (daypack.param_groups(model) for _ in range(2))
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    for a, b in zip(first, second, strict=True):
        names = [name for name, _ in a["params"]]
        assert names == [name for name, _ in b["params"]]
        assert names == sorted(names, key=order.__getitem__)
        assert names, "an empty group"


@crossed
def test_groups_work_in_every_optimizer(case: Case) -> None:
    """Built, trained, saved, loaded: names travel, extras stay, decay reaches its groups only."""
    model = Model()
    optimizer = case.create(daypack.param_groups(model, weight_decay=0.5), lr=1e-2)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(params)
    assert all("param_names" in group for group in optimizer.param_groups)
    before = values(params)
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name in ("ln_1.weight", "mixer.A_log", "q_norm.g", "scale", "batch.weight"):
        assert_same(params[name].detach(), before[name], name)
    assert not torch.equal(params["value_embeds.weight"], before["value_embeds.weight"])
    set_gradients(params, 0)
    optimizer.step()
    other = case.create(daypack.param_groups(model, weight_decay=0.1))
    other.load_state_dict(optimizer.state_dict())
    assert [g["weight_decay"] for g in other.param_groups] == [g["weight_decay"] for g in optimizer.param_groups]


def test_what_cannot_be_grouped_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay"):
        daypack.param_groups(Model(), weight_decay=-0.1)
    with pytest.raises(ValueError):
        daypack.param_groups(Model().requires_grad_(False))
