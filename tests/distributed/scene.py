"""Sharded parameters with given gradients, beside the same run in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.nn import Parameter

from ..conformance.scene import gradient, noise

# Uneven and empty parts, whole and ragged blocks, a convolution, experts, vectors, one element.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (37, 520),
    "few": (3, 300),
    "line": (1, 700),
    "conv": (6, 16, 3, 3),
    "experts": (4, 24, 64),
    "embedding": (301, 32),
    "striped": (24, 1024),
    "vector": (130,),
    "one": (1,),
}
Params = dict[str, Parameter]
Gradient = Callable[[str, tuple[int, ...], int], Tensor | None]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parameters(dtype: torch.dtype = torch.float32) -> Params:
    return {name: Parameter((0.5 * noise(shape, name)).to(dtype)) for name, shape in SHAPES.items()}


def sharded(params: Params, on: DeviceMesh, placements: tuple[Placement, ...] = (Shard(0),)) -> Params:
    parts = {name: distribute_tensor(p.detach(), on, placements, src_data_rank=None) for name, p in params.items()}
    return {name: Parameter(part) for name, part in parts.items()}


def like(p: Tensor, full: Tensor) -> Tensor:
    """A gradient of ``p``: its part of ``full`` where ``p`` is sharded."""
    full = full.to(p.dtype)
    return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else full


def set_gradients(params: Params, step: int, make: Gradient = gradient) -> None:
    for name, p in params.items():
        full = make(name, tuple(p.shape), step)
        p.grad = None if full is None else like(p, full)


def whole(tensor: Any) -> Any:
    """A copy of all of a tensor."""
    if not isinstance(tensor, Tensor):
        return tensor
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def content(params: Params, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All of the parameters and of their state."""
    found: dict[str, Any] = dict(params)
    for name, p in params.items():
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(p, {}).items()}
    return found | {key: whole(value) for key, value in (found | _gathered(found)).items()}


def _gathered(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """All of those ``tensors`` that are sharded over all ranks along dim 0, by one collective for them together."""
    parted = {
        key: value
        for key, value in tensors.items()
        if isinstance(value, DTensor)
        and value.placements == (Shard(0),)
        and value.device_mesh.shape == (dist.get_world_size(),)
    }
    if not parted:
        return {}
    mine = {key: value.to_local().detach() for key, value in parted.items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    for key, value in parted.items():
        together = torch.cat([part[key] for part in parts])
        assert together.shape == value.shape, key
        mine[key] = together
    return mine


#: State that needs nothing from other ranks, and is equal to the bit.
ALONE = ("_codes", "_scale", "_codebook", "step", "_row", "_block", "exp_avg")


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], alone: tuple[str, ...] = ALONE) -> None:
    """Equal to the bit but for sums over ranks, whose order differs, and for what follows from them."""
    assert list(ours) == list(theirs)
    for key, a in ours.items():
        b = theirs[key]
        assert a.shape == b.shape, key
        assert a.dtype == b.dtype, key
        if key.endswith(alone):
            assert torch.equal(a, b), (key, int((a != b).sum()), a.numel())
        elif a.dtype == torch.uint8:
            # A value between two levels may fall to either side.
            apart = (a.int() - b.int()).abs()
            assert int((apart > 0).sum()) <= max(2, 0.005 * a.numel()), key
        else:
            ulp = 2.0**-7 if a.dtype == torch.bfloat16 else 2.0**-20
            assert torch.allclose(a.double(), b.double(), rtol=ulp, atol=1e-7), (key, a, b)


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same but for sums in another order: a code that lies at a decision may be its neighbour, and what follows.

    Of the codes 0.2 % may differ (by one level), and scales by one place of bfloat16; everything else agrees to 1e-4.
    """
    assert list(ours) == list(theirs)
    for key, a in ours.items():
        b = theirs[key]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), key
        if key.endswith("_codes"):
            distance = (a.int() - b.int()).abs()
            assert not distance.numel() or distance.max() <= 1, key
            assert distance.sum() <= 1 + 2e-3 * distance.numel(), (key, int(distance.sum()))
        elif key.endswith(("_codebook", "step", "_block_size")):
            assert torch.equal(a, b), key
        else:
            rtol = 2.0**-7 if key.endswith("_scale") else 1e-4
            largest = float(b.double().abs().max()) if b.numel() else 0.0
            assert torch.allclose(a.double(), b.double(), rtol=rtol, atol=1e-5 * largest), key
