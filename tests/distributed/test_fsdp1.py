"""FullyShardedDataParallel (FSDP1), whose flat pieces keep fp32 moments: trained, saved and resumed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import daypack

from .ranks import run

OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "gefen"},
    {"name": "adam_mini", "bits": 8},
    {"name": "adafactor"},
    {"name": "lamb", "bits": 8, "second_moment": "factored"},
    {"name": "galore", "rank": 4},
    {"name": "adamw8bit", "min_8bit_size": 1},
    {"name": "sgd8bit", "momentum": 0.9, "min_8bit_size": 1},
    {"name": "lion8bit", "min_8bit_size": 1},
]


class Net(nn.Module):
    """Sizes that neither two ranks nor a block of 256 divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(131, 67), nn.LayerNorm(67), nn.Linear(67, 133)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


def make(original: bool, name: str, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=original)
    params = [p for p in net.parameters() if p.requires_grad]  # as a user groups them, after wrapping
    return net, daypack.create(name, params, lr=1e-2, **options)


def train(net: FSDP, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        x = torch.randn(8, 131, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def here(net: FSDP, optimizer: torch.optim.Optimizer) -> list[Any]:
    """This rank's pieces and their state."""
    return [
        (p.detach().clone(), {key: value.clone() for key, value in optimizer.state.get(p, {}).items()})
        for p in net.parameters()
        if p.requires_grad
    ]


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for (p, state), (q, other) in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        # A piece without elements has nothing to save.
        assert state.keys() == other.keys() or not p.numel()
        for key in state.keys() & other.keys() if p.numel() else ():
            assert state[key].dtype == other[key].dtype, key
            assert torch.equal(state[key], other[key]), key


def resumed(net: FSDP, optimizer: torch.optim.Optimizer, original: bool, options: dict[str, Any], kind: str) -> Any:
    again, other = make(original, **options)
    # Offloading to the CPU, the default, gives all states of a unit one memory there (torch 2.13 on gloo).
    full = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
    for each in (net, again):
        if kind == "sharded":
            FSDP.set_state_dict_type(each, StateDictType.SHARDED_STATE_DICT)
        else:
            FSDP.set_state_dict_type(each, StateDictType.FULL_STATE_DICT, *full)
    again.load_state_dict(copy.deepcopy(net.state_dict()))
    if kind == "checkpoint":
        set_optimizer_state_dict(again, other, copy.deepcopy(get_optimizer_state_dict(net, optimizer)))
    else:
        state = copy.deepcopy(FSDP.optim_state_dict(net, optimizer))
        other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, state))
    return again, other


def trains_and_resumes(original: bool) -> None:
    for options in OPTIMIZERS:
        net, optimizer = make(original, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(net, optimizer, 0, 3)
        assert len([w for w in caught if "0 of group 0" in str(w.message)]) == 1, options  # that it is not as elsewhere
        pairs = [resumed(net, optimizer, original, options, kind) for kind in ("full", "sharded", "checkpoint")]
        for pair in pairs:
            assert_equal(here(*pair), here(net, optimizer))
        train(net, optimizer, 3, 5)
        for pair in pairs:
            train(*pair, 3, 5)
            assert_equal(here(*pair), here(net, optimizer))


@pytest.mark.parametrize("original", [True, False])
def test_every_optimizer_trains_and_resumes(original: bool) -> None:
    run(2, trains_and_resumes, original)
