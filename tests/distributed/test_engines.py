"""Other engines that split optimizer state: torch's ZeroRedundancyOptimizer."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import Parameter

import daypack

from ..conformance.scene import gradient
from .ranks import run
from .scene import parameters


def zero(params: list[Parameter], **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optimizer_class=daypack.Gefen, lr=1e-2, **options)


def steps(params: dict[str, Parameter], optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        for name, p in params.items():
            p.grad = gradient(name, p.shape, step).to(p.dtype)
        optimizer.step()


def redundancy() -> tuple[dict[str, Tensor], int]:
    """Each rank keeps the state of some parameters. Saved, loaded and continued as if uninterrupted."""
    options = {"second_moment": "blocks"}
    ours = parameters()
    optimizer = zero(list(ours.values()), **options)
    steps(ours, optimizer, 0, 3)
    optimizer.consolidate_state_dict(to=0)
    box = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    buffer = io.BytesIO()
    torch.save(box[0], buffer)
    buffer.seek(0)
    again = {name: Parameter(p.detach().clone()) for name, p in ours.items()}
    other = zero(list(again.values()), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_state_dict(torch.load(buffer, weights_only=True))
    steps(ours, optimizer, 3, 6)
    steps(again, other, 3, 6)
    for name, p in ours.items():
        assert torch.equal(p, again[name]), name
    held = sum(v.numel() * v.element_size() for s in optimizer.optim.state.values() for v in s.values())
    return {name: p.detach() for name, p in ours.items()}, held


def test_zero_redundancy_optimizer_splits_saves_and_continues() -> None:
    (first, held), (second, other) = run(2, redundancy)
    alone = parameters()
    optimizer = daypack.Gefen(alone.values(), lr=1e-2, second_moment="blocks")
    steps(alone, optimizer, 0, 6)
    total = daypack.state_report(optimizer).total_bytes
    for name, p in alone.items():
        assert torch.equal(first[name], second[name]), name
        # Each rank learns its codebook from its own parameters.
        assert (first[name] - p.detach()).abs().mean() < 1e-3, name
    assert abs(held + other - total) < 64 * 1024
    assert max(held, other) < 0.75 * total
