"""torch's distributed checkpoint tools in one process without a process group, where state is probed for before use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import daypack

from .scene import assert_same, noise, set_gradients, state_of, structured, values
from .specs import Case, crossed

# Said at every save and load without a process group, which is what is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OPTIONS = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full-offloaded": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


class Net(nn.Module):
    """Linear, convolution, norm, embedding, and a layer that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 40)
        self.first = nn.Linear(384, 32)
        self.norm = nn.LayerNorm(32)
        self.conv = nn.Conv1d(8, 16, 3)
        self.unused = nn.Linear(96, 32)
        for name, p in self.named_parameters():
            p.data = 0.3 * noise(p.shape, "net", name).float()


UNUSED = ("unused.weight", "unused.bias")


def make(case: Case, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    return net, case.create(net.parameters(), **options)


def train(net: Net, optimizer: torch.optim.Optimizer, start: int, stop: int, late: bool = False) -> None:
    for step in range(start, stop):
        set_gradients(dict(net.named_parameters()), step, without=() if late else UNUSED)
        # Runs of 48 columns: block structure that a search finds, and that must travel.
        net.first.weight.grad = structured(32, 384, 48, "first", step).float()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def content(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    params = dict(net.named_parameters())
    return {"values": values(params), "state": state_of(optimizer, params)}


@pytest.mark.parametrize("kind", OPTIONS)
@crossed
def test_probing_for_state_leaves_training_unchanged(case: Case, kind: str) -> None:
    """The getter creates state by a step at rate 0 on zero gradients. Nothing may be learned or counted there."""
    net, optimizer = make(case)
    reference_net, reference = make(case)
    before = copy.deepcopy(values(dict(net.named_parameters())))
    probed = get_optimizer_state_dict(net, optimizer, options=OPTIONS[kind])
    assert_same(values(dict(net.named_parameters())), before)
    assert len(optimizer.state) == len(list(net.parameters()))
    assert all(state["step"] == 0 for state in optimizer.state.values())
    if kind != "flattened":
        assert probed.keys() == {"state", "param_groups"}
        assert probed["state"].keys() == dict(net.named_parameters()).keys()
    train(net, optimizer, 0, 3)
    train(reference_net, reference, 0, 3)
    assert_same(values(dict(net.named_parameters())), values(dict(reference_net.named_parameters())))


@crossed
def test_probing_with_zero_eps_makes_no_nan(case: Case) -> None:
    net, optimizer = make(case, weight_decay=0.5, **({"eps": 0.0} if case.takes("eps") else {}))
    before = values(dict(net.named_parameters()))
    get_optimizer_state_dict(net, optimizer)
    assert_same(values(dict(net.named_parameters())), before)
    train(net, optimizer, 0, 2)
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("saved_at", [0, 1, 3])
@crossed
def test_state_travels_through_getter_and_setter(case: Case, saved_at: int, kind: str) -> None:
    net, optimizer = make(case)
    train(net, optimizer, 0, saved_at, late=True)
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=OPTIONS[kind]))
    reference = content(net, optimizer)
    other_net, other = make(case, lr=case.spec.lr)
    other_net.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other_net, other, saved, options=OPTIONS[kind])
    assert_same(content(other_net, other), reference)
    train(net, optimizer, saved_at, 5, late=True)
    train(other_net, other, saved_at, 5, late=True)
    assert_same(content(other_net, other), content(net, optimizer))


@pytest.mark.parametrize("saved_at", [0, 1, 3])
@crossed
def test_checkpoint_loads_in_place_into_materialized_state(case: Case, saved_at: int, tmp_path: Path) -> None:
    """A template made without a step takes the saved tensors in place; moments are there, and training goes on."""
    net, optimizer = make(case)
    if saved_at == 0:
        daypack.materialize_state(optimizer)
    train(net, optimizer, 0, saved_at)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other_net, other = make(case)
    other_net.load_state_dict(net.state_dict())
    daypack.materialize_state(other)
    template = {"optimizer": other.state_dict()}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(template["optimizer"])
    assert_same(content(other_net, other), content(net, optimizer))
    train(net, optimizer, saved_at, 5)
    train(other_net, other, saved_at, 5)
    assert_same(content(other_net, other), content(net, optimizer))


@crossed
def test_checkpoint_through_the_getter_is_exact(case: Case, tmp_path: Path) -> None:
    net, optimizer = make(case)
    train(net, optimizer, 0, 3, late=not case.spec.ours)  # torch has no state for what never had a gradient
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other_net, other = make(case)
    other_net.load_state_dict(net.state_dict())
    template = {"optimizer": get_optimizer_state_dict(other_net, other)}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other_net, other, template["optimizer"])
    train(net, optimizer, 3, 5)
    train(other_net, other, 3, 5)
    assert_same(content(other_net, other), content(net, optimizer))


@crossed
def test_unused_parameter_has_state_and_trains_later(case: Case) -> None:
    """State with step 0 exists for what never got a gradient, travels, and the later first gradient is its step 1."""
    net, optimizer = make(case)
    before = values(dict(net.named_parameters()))
    train(net, optimizer, 0, 3)
    params = dict(net.named_parameters())
    for name in UNUSED:
        assert_same(params[name].detach(), before[name], name)
        assert optimizer.state[params[name]]["step"] == 0
    other_net, other = make(case)
    other_net.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other_net, other, copy.deepcopy(get_optimizer_state_dict(net, optimizer)))
    train(net, optimizer, 3, 4, late=True)
    train(other_net, other, 3, 4, late=True)
    assert_same(content(other_net, other), content(net, optimizer))
    for name in UNUSED:
        assert optimizer.state[params[name]]["step"] == 1
        assert not torch.equal(params[name], before[name])
