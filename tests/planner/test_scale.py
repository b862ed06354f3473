"""Plans against torch's own sharding at sizes that no test machine has: 70 B parameters over 1,024 ranks."""

from __future__ import annotations

import json
import sys

import pytest

from daypack.planner.memory import plan_memory
from daypack.planner.model import from_shapes
from daypack.planner.parallel import Parallel
from daypack.planner.state import plan_state
from tests.planner import shapes
from tests.processes import python

PARAMETERS = 70_553_706_496
PROGRAM = """
import json, sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

class Layer(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)

outer, layers = json.loads(sys.argv[1])
for world, rank in json.loads(sys.argv[2]):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (world,))
    model = Layer(outer)
    model.layers = nn.ModuleList(map(Layer, layers))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    print(sum(p.to_local().numel() * 4 for p in model.parameters()))
    dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="torch has no process groups there")
def test_per_rank_bytes_of_a_fully_sharded_70b_model():
    shape = {"layers": 80, "hidden": 8192, "mlp": 28672, "kv": 1024, "vocabulary": 128256}
    every = shapes.llama(**shape)
    per_layer = (len(every) - 3) // 80
    layers = [every[1 + i * per_layer : 1 + (i + 1) * per_layer] for i in range(80)]
    ranks = [(512, 511), (1024, 0), (1024, 512), (1024, 1023)]
    model = json.dumps([[every[0], *every[-2:]], layers])
    run = python(PROGRAM, model, json.dumps(ranks))
    assert run.returncode == 0, run.stderr
    spec = from_shapes(every)
    assert spec.elements == PARAMETERS
    for (world, rank), local in zip(ranks, map(int, run.stdout.split()), strict=True):
        row = plan_memory(spec, gpus=world, parallel="fsdp2", rank=rank, optimizers=["adamw"])["adamw"]
        assert row.weights == row.gradients == local, (world, rank)
        assert row.state == 2 * local + 4 * len(every)


STATE = """
import json, sys, torch, daypack
import torch.distributed as dist
from collections import Counter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from daypack.optim.base import CompressedOptimizer

world, rank, shapes = json.loads(sys.argv[1])
dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
whole = list(model.parameters())
dealt = ZeroRedundancyOptimizer(whole, optimizer_class=torch.optim.AdamW)._partition_parameters()[rank]
owned = [i for i, p in enumerate(whole) if any(p is q for group in dealt for q in group["params"])]
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
found = {}
for name in daypack.names():
    optimizer = daypack.create(name, list(model.named_parameters()))
    if isinstance(optimizer, CompressedOptimizer):
        optimizer.materialize_state()
    else:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    total = Counter()
    for state in optimizer.state.values():
        for key, value in state.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            total[key] += local.numel() * local.element_size()
    found[name] = total
print(json.dumps([owned, found]))
"""
SHAPES = [(64, 64), (130, 70), (7, 300), (40, 1), (513,), (5, 3, 3, 3), (4, 96, 64), (1000, 512)]


@pytest.mark.skipif(sys.platform == "win32", reason="torch has no process groups there")
@pytest.mark.parametrize(("world", "rank"), [(3, 2), (8, 4)])
def test_sharded_state_equals_what_a_rank_allocates(world, rank):
    """Every optimizer over what ``fully_shard`` has cut, uneven and empty shards included; and whose state is whose in
    torch's ZeroRedundancyOptimizer."""
    run = python(STATE, json.dumps([world, rank, SHAPES]))
    assert run.returncode == 0, run.stderr
    params = from_shapes(SHAPES).params
    owned, state = json.loads(run.stdout)
    assert sorted(map(int, Parallel("zero1", world, rank).owned(params))) == owned
    for name, found in state.items():
        planned = plan_state(name, params, parallel=Parallel("fsdp2", world, rank)).components
        assert {key: size for key, size in planned.items() if size} == {k: size for k, size in found.items() if size}, (
            name
        )
