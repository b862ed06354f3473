"""State of every registered optimizer, planned without memory: the field's reference figures, and exact to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import daypack
from daypack.formats.base import ComponentSpec
from daypack.formats.dense import Dense
from daypack.optim.registry import REGISTRY
from daypack.planner.model import from_module, from_shapes
from daypack.planner.parallel import Parallel
from daypack.planner.state import parse_optimizer, plan_state, state_bytes
from daypack.planner.transformer import llama_like
from tests.planner import shapes

GIB = 2**30
LLAMA_13B = shapes.llama(layers=40, hidden=5120, mlp=13824, kv=5120)


def registered(name: str) -> str:
    if name not in REGISTRY:
        pytest.skip(f"{name} is not registered yet")
    return name


def model() -> nn.Module:
    """Matrices, vectors, convolutions, an embedding, a frozen parameter and a tied one."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(211, 96), nn.Linear(96, 300), nn.LayerNorm(300), nn.Linear(300, 70), nn.Linear(2, 2),
        nn.Conv2d(3, 16, 5), nn.Conv1d(64, 64, 4, groups=64), nn.Linear(70, 96), nn.Linear(96, 211, bias=False),
    )  # fmt: skip
    net[8].weight = net[0].weight
    net[3].bias.requires_grad_(False)
    return net


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_every_optimizer_equals_its_allocation(name, dtype):
    net = model().to(dtype)
    optimizer = daypack.create(name, daypack.param_groups(net))
    for p in net.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    optimizer.step()
    spec = from_module(net)
    planned = plan_state(name, spec.params, module=spec.module)
    measured = daypack.state_report(optimizer)
    assert planned.total_bytes == measured.total_bytes
    assert planned.components == {key: size for key, size in measured.components.items() if size}


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("sgd", 1e9, 0),
        ("sgd:momentum=0.9", 1e9, 4e9),
        ("adam", 1e9, 8e9),
        ("adamw", 7e9, 56e9),
        ("adamw", 175e9, 1.4e12),
        ("adam8bit", 7e9, 14e9),
        ("adamw8bit", 7e9, 14e9),
        ("gefen", 7e9, 7.1e9),
    ],
)
def test_reference_figures_by_count(name, parameters, expected):
    registered(name.partition(":")[0])
    found = state_bytes(name, llama_like(int(parameters))[0])
    assert found == pytest.approx(expected, rel=0.03 if "8bit" in name else 0.005)


def test_llama_13b():
    assert state_bytes("adamw", LLAMA_13B) / GIB == pytest.approx(97.0, abs=0.15)
    assert 12.2 <= state_bytes("gefen", LLAMA_13B) / GIB <= 12.4
    for rank in (None, 0, 3, 7):
        sharded = plan_state("gefen", from_shapes(LLAMA_13B).params, parallel=Parallel("fsdp2", 8, rank))
        assert sharded.total_bytes / GIB == pytest.approx(1.53, abs=0.03)


def test_adafactor_of_a_square_matrix_is_its_rows_and_columns():
    registered("adafactor")
    assert state_bytes("adafactor", [(4096, 4096)]) - state_bytes("sgd", [(4096, 4096)]) in (32 * 1024, 32 * 1024 + 4)


def test_an_options_text():
    assert parse_optimizer("sgd:momentum=0.9:nesterov=true") == ("sgd", {"momentum": 0.9, "nesterov": True})
    assert parse_optimizer("gefen:second_moment=blocks:block_size=64")[1] == {
        "second_moment": "blocks",
        "block_size": 64,
    }
    blocks = daypack.estimate_state(LLAMA_13B, second_moment="blocks").total_bytes
    assert state_bytes("gefen:second_moment=blocks", LLAMA_13B) == blocks
    for text, problem in (("nope", "unknown optimizer 'nope'"), ("sgd:momentum", "cannot read the option")):
        with pytest.raises(ValueError, match=problem):
            parse_optimizer(text)
    with pytest.raises(ValueError, match=r"adamw: .*nothing_like_it"):
        state_bytes("adamw:nothing_like_it=1", [(4, 4)])


def test_tied_counts_once_frozen_not_at_all_and_nothing_is_allocated():
    net = model()
    shared = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert state_bytes("adamw", net.named_parameters()) == 8 * shared + 4 * sum(
        p.requires_grad for p in net.parameters()
    )
    assert state_bytes("adamw", [p for p in net.parameters() for _ in range(2)]) == state_bytes(
        "adamw", net.parameters()
    )
    assert plan_state("gefen", []).total_bytes == 0


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("world", [2, 3, 8])
def test_row_shards_add_up(name, world):
    """Rows are dealt out as torch.chunk does; what has no rows is on every rank."""
    params = from_shapes([(64, 64), (130, 70), (7, 300), (1, 40), (513,), (5, 3, 3, 3), (4, 96, 64)]).params
    whole = plan_state(name, params).components
    ranks = [plan_state(name, params, parallel=Parallel("fsdp2", world, rank)).components for rank in range(world)]
    assert plan_state(name, params, parallel=Parallel("fsdp2", world)).components == ranks[0]
    for key, size in whole.items():
        replicated = sum(rank[key] for rank in ranks) - size
        assert replicated % (world - 1) == 0 or replicated >= 0
        if key.endswith(("_codebook", "step")):
            assert all(rank[key] == size for rank in ranks)
        if key.endswith("_codes") or (key in ("exp_avg", "exp_avg_sq") and name in ("adam", "adamw")):
            assert replicated == 0


def test_a_square_matrix_keeps_its_column_factors_whole():
    """Rows and columns are as many here, so shapes alone would not tell which of the two is sharded."""
    sharded = plan_state("gefen", from_shapes([(512, 512)]).params, parallel=Parallel("fsdp2", 4)).components
    assert sharded["exp_avg_sq_row"] == 4 * 128
    assert sharded["exp_avg_sq_col"] == 4 * 512
    assert sharded["exp_avg_codes"] == 512 * 128
    assert sharded["exp_avg_codebook"] == 1024


def test_zero_one_deals_whole_parameters_and_zero_two_flat_vectors():
    params = from_shapes([("a", (100, 10)), ("b", (50, 10)), ("c", (49, 10)), ("d", (10,))]).params
    dealt = [plan_state("adamw", params, parallel=Parallel("zero1", 2, rank)).total_bytes for rank in range(2)]
    assert dealt == [8 * 1000 + 4 * 1 + 8 * 0, 8 * 1000 + 4 * 3]
    assert plan_state("adamw", params, parallel=Parallel("zero1", 2)).total_bytes in dealt
    assert plan_state("adamw", from_shapes([(3,)]).params, parallel=Parallel("zero1", 2, 1)).total_bytes == 0
    flat = plan_state("adamw", params, parallel=Parallel("zero2", 3))
    assert flat.total_bytes == 8 * 667 + 4


def test_temporaries():
    """torch's AdamW on a GPU holds one more copy of what it steps; one at a time, of the largest; ours a chunk."""
    params = from_shapes([(1000, 1000), (500, 500)]).params
    assert plan_state("adamw", params).temporaries == pytest.approx(4 * 1_250_000, rel=0.01)
    assert plan_state("adamw", params, foreach=False).temporaries == pytest.approx(2 * 4 * 1_000_000, rel=0.01)
    assert plan_state("adamw", params, {"fused": True}).temporaries == 0
    assert plan_state("adamw", params, {"fused": True}).total_bytes == plan_state("adamw", params).total_bytes
    assert plan_state("gefen", from_shapes([(10**5, 10**5)]).params).temporaries == 64 * 2**20


class Paged(daypack.Gefen):
    """Takes the option and allocates as ever."""

    def __init__(self, params, placement="resident", **options):
        assert placement == "resident"
        super().__init__(params, **options)


def test_paged_state_waits_on_the_host(monkeypatch):
    monkeypatch.setitem(REGISTRY, "paged", Paged)
    params = from_shapes([(10_000, 10_000), (10_000, 10_000)]).params
    resident, paged = (plan_state("paged", params, {"placement": kind}) for kind in ("resident", "paged"))
    assert paged.components == resident.components
    assert (resident.offloaded, resident.device_bytes) == (0, resident.total_bytes)
    assert (paged.offloaded, paged.device_bytes) == (resident.total_bytes, 2 * 64 * 2**20)


def test_projection_works_on_whole_parameters_and_keeps_no_moment_of_every_element():
    params = from_shapes([(4096, 4096)]).params
    assert plan_state("gefen", params).keeps_both_moments
    found = plan_state("galore", params, {"rank": 8})
    assert not found.keeps_both_moments
    assert found.temporaries == 64 * 2**20 + 8 * 4 * 4096 * 4096
    assert found.components["basis"] == 4 * 8 * 4096


def test_state_larger_than_dense_is_noted(monkeypatch):
    class Wide(Dense):
        """Keeps each element three times."""

        def components(self, view, dtype):
            return (ComponentSpec("", (*view.shape, 3), torch.float32),)

    class Wasteful(daypack.Gefen):
        def plan(self, shape, dtype, group, name):
            return replace(super().plan(shape, dtype, group, name), exp_avg=Wide())

    monkeypatch.setitem(REGISTRY, "wasteful", Wasteful)
    (note,) = plan_state("wasteful", from_shapes([("w", (64, 64))]).params).notes
    assert "w (64, 64)" in note
    assert "more than two dense moments" in note
