"""State saved on some ranks continues on others, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import daypack

from ..conformance.scene import gradient, noise
from .ranks import run
from .scene import content, like

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gefen": {"name": "gefen"},
    "gefen-blocks": {"name": "gefen", "second_moment": "blocks"},
}


class Net(nn.Module):
    """Seven rows and one row (uneven and empty parts), experts, a convolution, vectors, a layer without gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.seven, self.one = nn.Linear(320, 7), nn.Linear(96, 1, bias=False)
        self.convolution, self.norm = nn.Conv2d(16, 5, 3), nn.LayerNorm(40)
        self.experts = nn.Parameter(torch.zeros(3, 24, 64))
        self.unused = nn.Linear(32, 33)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(0.5 * noise(p.shape, name))
        self.to(dtype)


def make(shard: bool, options: dict[str, Any]) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    if shard:
        fully_shard(net)
    return net, daypack.create(params=net.named_parameters(), **{"lr": 1e-2, **options})


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        for name, p in net.named_parameters():
            p.grad = None if name.startswith("unused") else like(p, gradient(name, p.shape, step))
        optimizer.step()


def compare(net: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    for key, value in content(dict(net.named_parameters()), optimizer).items():
        assert value.dtype == saved[key].dtype, key
        assert torch.equal(value, saved[key]), key


def save(options: dict[str, Any], shard: bool, path: str, flatten: bool) -> Any:
    net, optimizer = make(shard, options)
    steps(net, optimizer, 0, 3)
    getter = StateDictOptions(flatten_optimizer_state_dict=flatten)
    state = get_optimizer_state_dict(net, optimizer, options=getter)
    dcp.save({"model": net.state_dict(), "optimizer": state}, checkpoint_id=path)
    at_save = content(dict(net.named_parameters()), optimizer)
    full = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    return at_save, copy.deepcopy(full)


def load(options: dict[str, Any], shard: bool, path: str, flatten: bool, saved: Any, probe: bool) -> Any:
    net, optimizer = make(shard, options)
    getter = StateDictOptions(flatten_optimizer_state_dict=flatten)
    if not probe:
        daypack.materialize_state(optimizer)
    state = get_optimizer_state_dict(net, optimizer, options=getter)
    model = net.state_dict()
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=path)
    net.load_state_dict(model)
    set_optimizer_state_dict(net, optimizer, state, options=getter)
    compare(net, optimizer, saved[0])
    # The full state, as rank 0 alone may have it, loads into the same place.
    again, other = make(shard, options)
    again.load_state_dict(net.state_dict())
    full = saved[1] if dist.get_rank() == 0 else {}
    options_of_full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=shard and dist.get_world_size() > 1)
    set_optimizer_state_dict(again, other, full, options=options_of_full)
    compare(again, other, saved[0])
    steps(net, optimizer, 3, 5)
    steps(again, other, 3, 5)
    after = content(dict(net.named_parameters()), optimizer)
    compare(again, other, after)
    return after


def rounds(options: dict[str, Any], folder: str, world: int) -> list[Any]:
    """One group of ranks saves and loads sharded state, flat and nested; what it saved is for the other groups."""
    result = []
    for flatten in (False, True):
        path = f"{folder}/from{world}-{flatten}"
        saved = save(options, world > 0, path, flatten)
        load(options, True, path, flatten, saved, probe=flatten)
        result.append(saved)
    return result


def visit(options: dict[str, Any], folder: str, others: dict[int, list[Any]]) -> None:
    """State that other numbers of ranks saved."""
    for world, both in others.items():
        for flatten, saved in zip((False, True), both, strict=True):
            load(
                options, dist.get_world_size() > 1, f"{folder}/from{world}-{flatten}", flatten, saved, probe=not flatten
            )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_ranks_continues_what_any_other_saved(optimizer: str, tmp_path: Path) -> None:
    options = OPTIMIZERS[optimizer]
    saved = {world: run(world, rounds, options, str(tmp_path), world)[0] for world in (2, 3)}
    for world in (1, 4):
        run(world, visit, options, str(tmp_path), saved)
    run(2, visit, options, str(tmp_path), {3: saved[3]})


#: Every other way to store state. Pieces of Adam-mini's lines, of LAMB's norms and of Adafactor's means travel too.
OTHERS: list[dict[str, Any]] = [
    {"name": "adamw8bit", "min_8bit_size": 1},
    {"name": "adam8bit", "map": "learned", "min_8bit_size": 1},
    {"name": "sgd8bit", "momentum": 0.9, "min_8bit_size": 1},
    {"name": "lion8bit", "min_8bit_size": 1},
    {"name": "adam_mini", "bits": 8, "partition": [["seven.weight", "row:1"], ["experts", "tensor"]]},
    {"name": "adafactor", "beta1": 0.9, "bits": 8},
    {"name": "lamb", "bits": 8, "second_moment": "factored"},
    {"name": "gefen", "placement": "paged"},
]


def save_others(folder: str) -> list[Any]:
    return [save(options, True, f"{folder}/{i}", False) for i, options in enumerate(OTHERS)]


def load_others(folder: str, saved: list[Any]) -> None:
    for i, options in enumerate(OTHERS):
        load(options, dist.get_world_size() > 1, f"{folder}/{i}", False, saved[i], probe=bool(i % 2))


def test_every_format_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    saved = run(2, save_others, str(tmp_path))
    # What is whole on every rank is the same on every rank.
    for (first, _), (second, _) in zip(*saved, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[key]) for key, value in first.items())
    for world in (1, 2, 3):
        run(world, load_others, str(tmp_path), saved[0])


def grouped(reverse: bool) -> tuple[Net, torch.optim.Optimizer, Any]:
    """Matrices and vectors apart, as they are decayed, not in the order of the modules; a group that is all frozen."""
    net = Net()
    net.unused.requires_grad_(False)
    fully_shard(net.seven)
    fully_shard(net)
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    groups = [[(n, p) for n, p in named if p.dim() > 1], [(n, p) for n, p in named if p.dim() <= 1]]
    frozen = [(n, p) for n, p in net.named_parameters() if not p.requires_grad]
    decays = (0.1, 0.0)
    optimizer = daypack.Gefen(
        [
            *({"params": g[::-1] if reverse else g, "weight_decay": d} for g, d in zip(groups, decays, strict=True)),
            {"params": frozen, "lr": 5.0},
        ],
        lr=1e-2,
    )
    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def groups_travel(folder: str) -> None:
    net, optimizer, scheduler = grouped(False)
    # Launchers read the state and put it back before the first step.
    empty = optimizer.state_dict()
    assert empty["state"] == {}
    optimizer.load_state_dict(copy.deepcopy(empty))
    assert not optimizer.state
    for step in range(3):
        steps(net, optimizer, step, step + 1)
        scheduler.step()
    state = get_optimizer_state_dict(net, optimizer)
    dcp.save({"model": net.state_dict(), "optimizer": state}, checkpoint_id=folder)
    again, other, resumed = grouped(True)
    state, model = get_optimizer_state_dict(again, other), again.state_dict()
    kinds = {
        (p, key): (type(v), getattr(v, "placements", None)) for p, s in other.state.items() for key, v in s.items()
    }
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=folder)
    again.load_state_dict(model)
    set_optimizer_state_dict(again, other, state)
    for p, entry in other.state.items():
        for key, value in entry.items():
            assert kinds[p, key] == (type(value), getattr(value, "placements", None)), key
    for mine, theirs, rate in zip(optimizer.param_groups, other.param_groups, (1e-2, 1e-2, 5.0), strict=True):
        assert theirs["initial_lr"] == rate
        assert theirs["lr"] == mine["lr"] == rate / 8
        assert theirs["weight_decay"] == mine["weight_decay"]
    resumed.load_state_dict(scheduler.state_dict())
    for step in (3, 4):
        for each, of, schedule in ((net, optimizer, scheduler), (again, other, resumed)):
            steps(each, of, step, step + 1)
            schedule.step()
        compare(again, other, content(dict(net.named_parameters()), optimizer))


def test_groups_schedules_and_frozen_parameters_travel(tmp_path: Path) -> None:
    run(2, groups_travel, str(tmp_path))


def asynchronous(folder: str) -> None:
    """What async_save writes is the moment of the call, though training goes on."""
    net, optimizer = make(True, OPTIMIZERS["gefen"])
    steps(net, optimizer, 0, 2)
    at_save = content(dict(net.named_parameters()), optimizer)
    state = {"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    # A process group of its own: the collectives of training must not meet those of the background thread.
    future = dcp.async_save(state, checkpoint_id=f"{folder}/async", process_group=dist.new_group(backend="gloo"))
    steps(net, optimizer, 2, 6)
    future.result()
    net, optimizer = make(True, OPTIMIZERS["gefen"])
    model, state = net.state_dict(), get_optimizer_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=f"{folder}/async")
    net.load_state_dict(model)
    set_optimizer_state_dict(net, optimizer, state)
    compare(net, optimizer, at_save)


def test_asynchronous_save_is_not_torn(tmp_path: Path) -> None:
    run(2, asynchronous, str(tmp_path))
