"""Splitting a model into decayed and undecayed groups."""

import pytest
import torch
from torch import nn

import daypack


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, width))  # two-dimensional, and still a norm's gain


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(8, 4))
        self.dt_bias = nn.Parameter(torch.zeros(8))
        self.conv = nn.Conv1d(8, 8, 4, groups=8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 8)
        self.ln_f = nn.LayerNorm(8)
        self.q_norm = RMSNorm(8)
        self.bn = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.mixer = Mixer()
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.wte.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)


def test_split():
    groups = daypack.param_groups(Model(), weight_decay=0.1)
    found = {name: (group["weight_decay"], group["embedding"]) for group in groups for name, _ in group["params"]}
    decayed = {name for name, (decay, _) in found.items() if decay}
    assert decayed == {"wte.weight", "attention.in_proj_weight", "attention.out_proj.weight", "mixer.conv.weight"}
    assert {name for name, (_, embedding) in found.items() if embedding} == {"wte.weight"}
    assert set(found) - decayed == {
        "ln_f.weight", "ln_f.bias", "q_norm.g", "bn.weight", "bn.bias", "attention.in_proj_bias",
        "attention.out_proj.bias", "mixer.A_log", "mixer.dt_bias", "mixer.conv.bias",
    }  # fmt: skip


def test_report_says_why():
    text = str(daypack.param_groups(Model(), weight_decay=0.1))
    for part in (
        "q_norm.g (1, 8): parameter of a norm (RMSNorm)",
        "weight_decay=0.1 embedding=True: 1 parameters, 400",
    ):
        assert part in text


@pytest.mark.parametrize("name", daypack.names())
def test_report_is_the_same_after_an_optimizer_took_the_groups(name):
    """torch puts plain parameters and their names in place of the pairs."""
    groups = daypack.param_groups(Model(), weight_decay=0.1)
    before = str(groups)
    daypack.create(name, groups, lr=1e-3)
    assert str(groups) == before


@pytest.mark.parametrize("name", daypack.names())
def test_every_optimizer_takes_them(name):
    model = Model()
    optimizer = daypack.create(name, daypack.param_groups(model), lr=1e-3)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for _ in range(2):  # ADOPT's first step moves nothing
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn_like(p)
        optimizer.step()
    assert {key for key, p in model.named_parameters() if not torch.equal(p, before[key])} == {
        key for key, p in model.named_parameters() if p.requires_grad
    }


def test_refusals():
    for model in ([torch.ones(2)], nn.Linear(2, 2).parameters(), None):
        with pytest.raises(ValueError, match=r"takes a torch\.nn\.Module, .* got (list|generator|NoneType)"):
            daypack.param_groups(model)
    with pytest.raises(ValueError, match=r"weight_decay of param_groups must be a number, got '0\.1'"):
        daypack.param_groups(Model(), weight_decay="0.1")
    with pytest.raises(ValueError, match="weight_decay of param_groups must not be negative, got -1"):
        daypack.param_groups(Model(), weight_decay=-1)
    with pytest.raises(ValueError, match="no trainable parameter"):
        daypack.param_groups(nn.Linear(2, 2).requires_grad_(False))


def test_lazy_parameters_are_named_with_the_remedy():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    named = r"0\.weight, 0\.bias of lazy modules have no shape yet; pass one batch"
    with pytest.raises(ValueError, match=named):
        daypack.param_groups(model)
    with pytest.raises(ValueError, match=named):
        daypack.plan(model)
    with pytest.raises(ValueError, match=r"0\.weight of lazy"):
        daypack.Gefen(model.named_parameters())
    model(torch.ones(1, 3))
    assert daypack.Gefen(daypack.param_groups(model)).param_groups[0]["params"][0].shape == (4, 3)
