"""A monitor asks no other rank: one rank alone may have one, and its numbers are those of its own part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import daypack

from . import ranks, scene

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")


def watched(name: str) -> dict[str, Any]:
    """Train sharded parameters; the last rank alone is watched, so that any collective of a monitor's would hang."""
    params = scene.sharded(scene.parameters(), scene.mesh())
    optimizer = daypack.create(name, params.values(), lr=1e-2)
    last = dist.get_rank() == dist.get_world_size() - 1
    handle = daypack.monitor(optimizer, interval=2) if last else None
    moved = []
    for step in range(4):
        scene.set_gradients(params, step)
        before = [p.to_local().detach().clone() for p in params.values()]
        optimizer.step()
        parts = zip(params.values(), before, strict=True)
        moved = [(p.to_local().detach() - old).square().sum().item() for p, old in parts]
    elements = sum(p.to_local().numel() for p in params.values())
    return {
        "content": scene.content(params, optimizer),
        "rms": math.sqrt(sum(moved) / elements),
        "bytes": daypack.state_report(optimizer).total_bytes,
        "readings": [(reading.step, reading.values) for reading in handle.readings] if handle else None,
    }


@pytest.mark.parametrize("name", ["gefen", "adamw8bit", "adamw"])
def test_one_rank_of_two_is_watched(name: str) -> None:
    first, second = ranks.run(2, watched, name)
    assert first["readings"] is None
    assert [step for step, _ in second["readings"]] == [2, 4]
    found = second["readings"][-1][1]
    assert found["optimizer/update_rms"] == pytest.approx(second["rms"], rel=0.1)
    assert found["optimizer/state_bytes"] == second["bytes"]
    assert found["optimizer/nonfinite"] == 0
    if name != "adamw":
        assert abs(found["optimizer/exp_avg/radial_bias"]) < 1e-2
    for key, value in first["content"].items():
        assert torch.equal(value, second["content"][key]), key
