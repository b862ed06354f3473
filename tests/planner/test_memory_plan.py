"""The plan as a whole: its sums, what fits, the largest batch, the recommendation."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import daypack
from daypack.optim.registry import REGISTRY
from daypack.planner.devices import GPUS, gpu_memory
from daypack.planner.memory import plan_memory
from daypack.planner.model import from_module, from_shapes
from daypack.planner.sources import from_count
from daypack.planner.units import parse_bytes, parse_count, parse_dtype, show_bytes

GB = 10**9


def perceptron():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))


def spec(**more):
    def inputs(batch, sequence):
        return (torch.zeros(batch, 1024, device="meta"),)

    return from_module(perceptron(), inputs=inputs, **more)


def test_seven_billion_parameters():
    """28 GB of weights, 28 of gradients and 56 of AdamW's state are 112 GB; 8-bit state in 16 bits about 42."""
    row = plan_memory(from_count("7B"), optimizers=["adamw"])["adamw"]
    assert row.weights == row.gradients == 28 * GB
    assert row.state == pytest.approx(56 * GB, rel=1e-4)
    assert row.resident == pytest.approx(112 * GB, rel=1e-4)
    for name in ("adam8bit", "adamw8bit"):
        if name in REGISTRY:
            row = plan_memory(from_count("7B"), optimizers=[name], weights=torch.float16)[name]
            assert row.resident == pytest.approx(42 * GB, rel=0.02)
        else:
            print(f"{name} is not registered yet: not checked")


def test_every_registered_optimizer_has_a_row_and_the_sums_hold():
    plan = plan_memory(spec(), batch=8)
    assert [row.optimizer for row in plan.rows] == list(REGISTRY)
    assert not [row.problem for row in plan.rows if row.problem]
    for row in plan.rows:
        assert row.state == sum(row.components.values())
        assert row.total == row.weights + row.gradients + row.state + max(row.activations, row.temporaries)
        assert row.fits is None
        assert row.largest_batch is None
    assert plan.recommended is None
    assert "give a GPU" in plan.reason
    assert json.loads(json.dumps(plan.to_dict()))["rows"][0]["total"] == plan.rows[0].total
    assert "adamw" in str(plan)


def test_the_public_name():
    assert daypack.plan is plan_memory


@pytest.mark.parametrize("memory", [60, 100, 900])
def test_the_largest_batch_fits_and_the_next_does_not(memory):
    limit = memory * 10**6
    for row in plan_memory(spec(), memory=limit).planned:
        assert row.largest_batch is not None
        for batch, fits in ((row.largest_batch, True), (round(row.largest_batch * 1.05) + 1, False)):
            if batch:
                assert plan_memory(spec(), memory=limit, batch=batch, optimizers=[row.optimizer]).rows[0].fits is fits


def test_recommendations():
    roomy = plan_memory(spec(), memory=10**9, optimizers=["adamw", "gefen"])
    assert roomy.recommended == "adamw"
    assert "gefen would fit a micro-batch of" in roomy.reason
    large = [(8192, 8192)] * 4
    tight = plan_memory(large, memory=3 * GB, optimizers=["sgd", "adamw", "gefen"])
    assert tight.recommended == "gefen"
    assert "where adamw lacks" in tight.reason
    assert "both of its moments" in tight.reason
    fused = plan_memory(large, memory=45 * GB // 10, optimizers=["adamw", "gefen"])
    assert fused.recommended == "adamw"
    assert "fits with fused=True" in fused.reason
    none = plan_memory(spec(), memory=10**7)
    assert none.recommended is None
    assert none.reason.startswith("Nothing fits: even sgd lacks")
    assert plan_memory(large, memory=22 * GB // 10, optimizers=["sgd", "adamw", "gefen"]).recommended == "sgd"


def test_dtypes_masters_and_casts():
    elements = sum(p.numel() for p in perceptron().parameters())
    matrices = 2 * 1024 * 1024
    half = plan_memory(spec(), weights=torch.bfloat16, optimizers=["adamw"])["adamw"]
    assert (half.weights, half.gradients) == (2 * elements, 2 * elements)
    assert half.state == 4 * elements + 4 * 4  # torch keeps its moments in the dtype of the parameter
    assert half.copies == 0
    masters = plan_memory(spec(), weights=torch.bfloat16, master_weights=True, optimizers=["adamw"])["adamw"]
    assert masters.copies == 4 * elements
    assert masters.state == 8 * elements + 4 * 4
    autocast = plan_memory(spec(), compute=torch.bfloat16, optimizers=["adamw"])["adamw"]
    assert autocast.copies == 2 * matrices
    wide = plan_memory(spec(), weights=torch.bfloat16, gradients=torch.float32, optimizers=["adamw"])["adamw"]
    assert wide.gradients == 4 * elements


def test_parallel():
    elements = sum(p.numel() for p in perceptron().parameters())
    plans = {
        kind: plan_memory(spec(), gpus=4, parallel=kind, optimizers=["adamw", "gefen"])
        for kind in ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2")
    }
    whole, part = 4 * elements, 4 * elements // 4
    for kind, (weights, gradients, communication) in {
        "none": (whole, whole, 0),
        "ddp": (whole, whole, whole),
        "zero1": (whole, whole, whole),
        "zero2": (whole, part, 0),
        "zero3": (part, part, whole + whole // 2),
        "fsdp2": (part, part, whole + whole // 2),
    }.items():
        row = plans[kind]["adamw"]
        assert (row.weights, row.gradients, row.communication) == (weights, gradients, communication), kind
    assert plans["zero2"]["adamw"].state == 2 * part + 4
    assert any("flat fp32 vectors" in note for note in plans["zero3"].notes)
    assert plan_memory(spec(), gpus=4).parallel == "ddp"
    for arguments, problem in (
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"gpus": 2, "parallel": "magic"}, "unknown kind of parallelism 'magic'"),
        ({"gpus": 2, "rank": 2}, "rank must be between 0 and 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": 10**12}, "batch must be at most 1000000"),
        ({"optimizers": []}, "name at least one optimizer"),
        ({"memory": 1, "gpu": "t4"}, "not both"),
    ):
        with pytest.raises(ValueError, match=problem):
            plan_memory(spec(), **arguments)
    with pytest.raises(ValueError, match="no parameters"):
        plan_memory([])


def test_lora_on_a_module_and_on_shapes():
    adapted = plan_memory(spec(name="p"), lora_rank=4, weights=torch.bfloat16, batch=2, optimizers=["adamw"])
    trained = 2 * 2 * 4 * 1024
    assert adapted.trainable == trained
    row = adapted["adamw"]
    assert row.gradients == 4 * trained  # adapters stay in fp32
    assert row.state == 8 * trained + 4 * 4
    assert row.weights == 2 * (adapted.parameters - trained) + 4 * trained
    assert adapted.activations.how == "measured"
    named = [("q_proj.weight", (64, 64)), ("embed.weight", (100, 64)), ("norm.weight", (64,))]
    shapes = plan_memory(from_shapes(named), lora_rank=2, lora_targets=["q_*"], optimizers=["adamw"])
    assert shapes.trainable == 2 * 2 * 64
    assert plan_memory(from_shapes(named), lora_rank=2, optimizers=["adamw"]).trainable == 2 * 2 * 64
    with pytest.raises(ValueError, match=r"no matrix of .* is named by the LoRA targets nothing"):
        plan_memory(from_shapes(named), lora_rank=2, lora_targets=["nothing"])
    with pytest.raises(ValueError, match="at least 1"):
        plan_memory(spec(), lora_rank=0)


def test_a_real_module_stays_as_it_is_and_is_planned_like_its_meta_twin():
    def inputs(batch, sequence):
        return (torch.zeros(batch, 16, device="meta"),)

    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
    net[2].weight = nn.Parameter(net[0].weight.detach().t().contiguous())
    before = {key: value.clone() for key, value in net.state_dict().items()}
    plan = plan_memory(net, inputs=inputs, batch=4)
    assert plan.activations.how == "measured"
    assert plan.to_dict() == plan_memory(net.to("meta"), inputs=inputs, batch=4).to_dict()
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)).eval()
    net.load_state_dict(before)
    plan_memory(net, inputs=inputs, batch=2, compute=torch.bfloat16, lora_rank=2)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert not net.training


def test_a_model_of_transformers_needs_no_inputs():
    library = pytest.importorskip("transformers")
    config = library.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=64)
    plan = plan_memory(library.GPT2LMHeadModel(config), optimizers=["gefen"])
    assert plan.sequence == 64
    assert plan.activations.how == "measured"


def test_shapes_alone_have_no_activations():
    plan = plan_memory([(512, 512), ("bias", (512,))], memory=10**8)
    assert plan.activations.how == "unknown"
    assert plan["gefen"].largest_batch is None
    assert any(note.startswith("activations: not counted") for note in plan.notes)
    assert "largest batch" not in str(plan)


def test_an_optimizer_that_refuses_the_model_is_a_note_or_an_error(monkeypatch):
    class Picky(daypack.Gefen):
        def __init__(self, params, **options):
            raise ValueError("only for models with a vision tower")

    monkeypatch.setitem(REGISTRY, "picky", Picky)
    plan = plan_memory(spec())
    assert plan["picky"].problem == "only for models with a vision tower"
    assert "picky: only for models" in str(plan)
    assert plan["adamw"].state > 0
    with pytest.raises(ValueError, match="vision tower"):
        plan_memory(spec(), optimizers=["picky"])


def test_units():
    assert parse_bytes("24GB") == 24 * GB
    assert parse_bytes("24 GiB") == 24 * 2**30
    assert parse_bytes("0.5gb") == GB // 2
    assert parse_count("7B") == parse_count("7e9") == parse_count("7000M") == 7 * GB
    assert parse_dtype("BF16") is torch.bfloat16
    assert parse_dtype("torch.float16") is torch.float16
    for parse, texts in (
        (parse_bytes, ("24", "GB", "-1GB", "24 GBs", "1e400GB", "24bananas", "")),
        (parse_count, ("7Q", "0", "-7B", "1e30", "B", "", "nan")),
        (parse_dtype, ("int8", "fp8", "")),
    ):
        for text in texts:
            with pytest.raises(ValueError):
                parse(text)
    assert [show_bytes(x) for x in (0, 999, 1000, 27.04e9, 1.4e12)] == ["0 B", "999 B", "1.00 kB", "27.0 GB", "1.40 TB"]


def test_gpus():
    assert gpu_memory("H100") == gpu_memory("nvidia h100") == gpu_memory("h100-80gb") == 80 * GB
    assert gpu_memory("RTX 4090") == gpu_memory("4090") == 24 * GB
    assert gpu_memory("A100 40GB") == gpu_memory("a100-40") == 40 * GB
    assert all(gpu_memory(name) == size * GB for name, size in GPUS.items())
    with pytest.raises(ValueError, match="unknown GPU 'h900'; give --memory"):
        gpu_memory("h900")


def test_weights_that_have_16_bits_already_are_not_advised() -> None:
    for dtype, advised in ((torch.float32, True), (torch.bfloat16, False)):
        reason = daypack.plan([(40_000, 100_000)], weights=dtype, memory=1 << 30).reason
        assert reason.startswith("Nothing fits")
        assert ("16-bit weights" in reason) == advised
        assert "LoRA" in reason
