"""A step over parts equals a step over the whole, whatever each rank has or lacks."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import Parameter

import daypack
from daypack import kernels

from ..conformance.scene import gradient, structured
from ..kernels.pairs import needs_native
from .ranks import run
from .scene import (
    ALONE,
    SHAPES,
    assert_alike,
    assert_near,
    content,
    mesh,
    parameters,
    set_gradients,
    sharded,
    whole,
)

#: Every format and every rule. Adam-mini's groups of 5 rows, and of all rows, are cut by the parts.
VARIANTS: list[dict[str, Any]] = [
    {"name": "gefen"},
    {"name": "gefen", "second_moment": "blocks"},
    {"name": "adamw8bit"},
    {"name": "sgd8bit", "momentum": 0.9, "nesterov": True},
    {"name": "lion8bit"},
    {"name": "adam_mini", "partition": [["matrix", "row:5"], ["embedding", "tensor"], ["few", "column"]]},
    {"name": "adafactor", "beta1": 0.9, "bits": 8},
    {"name": "lamb", "bits": 8, "second_moment": "factored"},
    {"name": "gefen", "placement": "paged"},
]
#: Rules that the native kernels do not know. Muon gathers the directions of whole matrices.
REFERENCE_ALONE: list[dict[str, Any]] = [
    {"name": "adopt"},
    {"name": "ademamix", "alpha_warmup": 3, "beta3_warmup": 4},
    {"name": "muon", "ns_dtype": "float32", "beside_names": ["embedding", "few"]},
]
#: Optimizers that take more than column sums from all ranks: what of their state is equal to the bit all the same.
SHARED = {"adam_mini": ("_codes", "_scale", "_codebook", "step", "exp_avg"), "adafactor": ("step", "_row", "_codebook")}
LR = 1e-2


def create(params: dict[str, Parameter], name: str, **options: Any) -> torch.optim.Optimizer:
    return daypack.create(name, params.items(), **{"lr": LR, **options})


def eventful(name: str, shape: tuple[int, ...], step: int) -> Tensor | None:
    """Gradients with everything in them that needs an agreement: none, zeros, not finite in one element."""
    g = gradient(name, shape, step)
    if name == "few":
        return None if step == 1 else g  # unused for a step
    if name == "striped":  # blocks that only the first rows show, so that no rank may decide by its own
        g[:8] = structured(8, shape[1], 64, step)
    if name == "embedding" and step == 0:
        return torch.zeros_like(g)  # LoRA's A: calibrated a step later than the others
    if name == "conv" and step == 2:
        g.view(-1)[-1] = float("nan")  # in the part of the last rank alone
    return g


def equal_to_one_process(
    variant: dict[str, Any], dtype: torch.dtype, kind: str, kernel: Literal["native", "reference"] = "reference"
) -> None:
    alone = parameters(dtype)
    if kind == "sharded":
        together = sharded(alone, mesh())
    else:
        grid = init_device_mesh("cpu", (2, 2))
        together = sharded(alone, grid, (Shard(0) if kind == "nested" else Replicate(), Shard(0)))
        if kind == "both":  # every other parameter over all ranks
            together |= sharded({name: alone[name] for name in list(alone)[::2]}, mesh())
    ours, theirs = create(together, **variant), create(alone, **variant)
    rank, world = dist.get_rank(), dist.get_world_size()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not finite")
        for step in range(5):
            set_gradients(together, step, eventful)
            set_gradients(alone, step, eventful)
            if step == 3 and kind == "sharded":
                # Only the last rank has a gradient of this parameter: the others' parts count as zeros.
                part = whole(together["matrix"].grad)
                local = together["matrix"].grad.to_local()
                if rank < world - 1:
                    part[: -(local.shape[0]) or None] = 0
                rows = together["matrix"].to_local().shape[0]
                last = torch.tensor([rows if rank == world - 1 else 0])
                dist.all_reduce(last)
                full = whole(alone["matrix"].grad)
                full[: len(full) - int(last)] = 0
                alone["matrix"].grad = full
                if rank < world - 1:
                    together["matrix"].grad = None
            with kernels.use(kernel):
                ours.step()
                theirs.step()
            found = content(together, ours), content(alone, theirs)
            if kernel == "reference":
                assert_alike(*found, SHARED.get(variant["name"], ALONE))
            else:
                assert_near(*found)
                parts = [together[name] for name in SHAPES if together[name].grad is not None]
                assert {ours.kernels()[p] for p in parts} == {"native"}
    assert ours.skipped == theirs.skipped == {"conv": 1}
    if variant.get("second_moment") == "blocks":
        found = [
            o.state[params["striped"]]["exp_avg_sq_block_size"] for o, params in ((ours, together), (theirs, alone))
        ]
        assert found == [64, 64]
    for name, p in together.items():
        assert ours.state[p]["step"] == theirs.state[alone[name]]["step"], name
        for key, value in ours.state[p].items():
            if isinstance(value, DTensor):
                assert (value.placements, value.device_mesh) == (p.placements, p.device_mesh), (name, key)


def all_equal(dtype: torch.dtype, kind: str, kernel: Any) -> None:
    for variant in VARIANTS + REFERENCE_ALONE * (kernel == "reference"):
        try:
            equal_to_one_process(variant, dtype, kind, kernel)
        except AssertionError as error:
            raise AssertionError(f"{variant}: {error}") from error


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_process(world: int) -> None:
    run(world, all_equal, torch.bfloat16 if world == 3 else torch.float32, "sharded", "reference")


@needs_native
@pytest.mark.parametrize("world", [2, 3])
def test_native_kernels_equal_one_process(world: int) -> None:
    run(world, all_equal, torch.float32, "sharded", "native")


def test_hybrid_shards_equal_one_process() -> None:
    """Two replicas of two shards."""
    run(4, equal_to_one_process, VARIANTS[0], torch.float32, "hybrid")


@pytest.mark.parametrize("kind", ["nested", "both"])
def test_shards_of_several_process_groups_equal_one_process(kind: str) -> None:
    """Halves of halves, whose sums take two groups; and parameters over two ranks beside others over four."""
    run(4, equal_to_one_process, VARIANTS[0], torch.float32, kind)


def placed_otherwise() -> None:
    """Gradients that are whole on every rank, or still to be added up, step as those that lie as the parameter does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for kind in ("as the parameter", "whole", "to be added up"):
        params = sharded(parameters(), mesh())
        optimizer = create(params, "gefen")
        for step in range(3):
            set_gradients(params, step)
            for p in params.values():
                full = whole(p.grad)
                if kind == "whole":
                    p.grad = DTensor.from_local(full, p.device_mesh, [Replicate()], run_check=False)
                elif kind == "to be added up":
                    part = full if rank == world - 1 else torch.zeros_like(full)
                    p.grad = DTensor.from_local(part, p.device_mesh, [Partial()], run_check=False)
            optimizer.step()
        results.append(content(params, optimizer))
    for other in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(other[key], value), key


def test_gradients_may_be_placed_otherwise() -> None:
    run(2, placed_otherwise)


def refusals() -> None:
    """What one rank refuses, all refuse, and nothing changes."""
    params = sharded(parameters(), mesh())
    optimizer = create(params, "gefen")
    set_gradients(params, 0)
    optimizer.step()
    before = content(params, optimizer)
    set_gradients(params, 1)
    mine = dist.get_rank() == 1
    if mine:
        optimizer.param_groups[0]["eps"] = -1.0
    with pytest.raises(ValueError, match="eps" if mine else "another rank"):
        optimizer.step()
    optimizer.param_groups[0]["eps"] = 1e-8
    set_gradients(params, 1)
    saved = optimizer.state_dict()
    if mine:
        saved["state"][0]["exp_avg_scale"] = torch.zeros(1)
    with pytest.raises(ValueError, match="exp_avg_scale" if mine else "another rank"):
        optimizer.load_state_dict(saved)
    for key, value in content(params, optimizer).items():
        assert torch.equal(value, before[key]), key
    # One rank's gradient is not finite: every rank passes over the parameter, or every rank raises.
    for group in optimizer.param_groups:
        group["nonfinite"] = "raise"
    if mine:
        params["matrix"].grad.to_local().fill_(float("inf"))
    with pytest.raises(ValueError, match="matrix is not finite"):
        optimizer.step()
    for key, value in content(params, optimizer).items():
        assert torch.equal(value, before[key]), key


def test_what_one_rank_refuses_all_refuse() -> None:
    run(2, refusals)


def column_shards() -> None:
    params = sharded(parameters(), mesh(), (Shard(0),))
    from torch.distributed.tensor import distribute_tensor

    params["column"] = Parameter(distribute_tensor(torch.zeros(8, 512), mesh(), [Shard(1)]))
    with pytest.raises(ValueError, match=r"a DTensor of shape \(37, 520\) cannot be projected.*rank=None"):
        daypack.materialize_state(create({"matrix": params["matrix"]}, "galore", rank=4))
    with pytest.raises(ValueError, match=r"parameter column is a DTensor placed as .*shard it along dim 0"):
        create(params, "gefen")


def test_column_shards_and_projections_are_refused_with_the_remedy() -> None:
    run(2, column_shards)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.last = nn.Linear(64, 9), nn.LayerNorm(9), nn.Linear(9, 1)
        self.tied = nn.Linear(9, 64, bias=False)
        self.tied.weight = Parameter(self.first.weight.detach().t().contiguous())
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        return (self.last(hidden) + self.tied(hidden).mean(-1, keepdim=True)).square().mean()


def fully_sharded() -> list[float]:
    """fully_shard, with a rank whose part of a layer is empty, a frozen layer and one that nothing uses."""
    from torch.distributed.fsdp import fully_shard

    net = Net()
    for module in (net.first, net.tied, net.frozen):
        fully_shard(module)
    fully_shard(net)
    optimizer = daypack.Gefen(net.named_parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step % 4))
        loss = net(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(float(optimizer.state[p]["step"]) == 0 for p in net.unused.parameters())
    assert not any(p in optimizer.state for p in net.frozen.parameters())
    return losses


def test_fully_shard_trains() -> None:
    for losses in run(2, fully_sharded):
        assert sum(losses[-4:]) < 0.5 * sum(losses[:4])


def replicas(seed: int) -> str:
    """DDP under another global seed on each rank: nothing of ours may depend on it."""
    net = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    torch.manual_seed(seed + dist.get_rank())
    optimizer = daypack.Gefen(net.named_parameters(), lr=1e-3)
    for _ in range(5):
        net(torch.randn(8, 64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [p.detach() for p in net.parameters()]
    values += [v for p in net.parameters() for v in optimizer.state.get(p, {}).values()]
    return ",".join(str(hash(bytes(v.contiguous().view(-1).view(torch.uint8).numpy()))) for v in values if v.dim())


def test_replicas_stay_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    first, second = run(2, replicas, 7)
    assert first == second


def test_shapes_have_uneven_and_empty_parts() -> None:
    """On 2, 3 and 4 ranks some parts are uneven and some are empty: else the tests above would show little."""
    for world in (2, 3, 4):
        sizes = {name: [len(part) for part in torch.empty(shape[0]).chunk(world)] for name, shape in SHAPES.items()}
        assert any(len(parts) < world for parts in sizes.values())
        assert any(len(set(parts)) > 1 for parts in sizes.values())
