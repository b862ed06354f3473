"""Plans against torch's own sharding at sizes that no test machine has: 70 B parameters over 1,024 ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from daypack.planner.memory import plan_memory
from daypack.planner.model import from_shapes
from tests.planner import shapes

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
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, model, json.dumps(ranks)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    spec = from_shapes(every)
    assert spec.elements == PARAMETERS
    for (world, rank), local in zip(ranks, map(int, run.stdout.split()), strict=True):
        row = plan_memory(spec, gpus=world, parallel="fsdp2", rank=rank, optimizers=["adamw"])["adamw"]
        assert row.weights == row.gradients == local, (world, rank)
        assert row.state == 2 * local + 4 * len(every)
