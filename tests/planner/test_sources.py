"""Models from files, functions and names; every refusal is one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import daypack
from daypack.planner import pretrained, sources
from daypack.planner.memory import plan_memory
from daypack.planner.sources import from_count, load_model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
ELEMENTS = 2 * 100 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def net():\n    return torch.nn.Linear(8, 4)\n"
        "def pair():\n    return net(), lambda batch, sequence: (torch.zeros(batch, 8, device='meta'),)\n"
        "def broken():\n    raise RuntimeError('no such\\nluck')\n"
        "def number():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_models"


def test_a_config_and_its_folder(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        spec = load_model(str(path))
        assert spec.elements == ELEMENTS
        assert {p.dtype for p in spec.params} == {torch.bfloat16}
        assert spec.context == 128
        plan = plan_memory(spec, optimizers=["gefen"])
        assert plan.sequence == 128
        assert plan.activations.how == "measured"


def test_a_model_type(monkeypatch):
    pytest.importorskip("transformers")
    spec = load_model("gpt2")
    assert spec.elements == 124_439_808  # tied weights once
    with pytest.raises(ValueError, match="'gpt9' is neither a file nor a model type"):
        load_model("gpt9")
    monkeypatch.setattr(pretrained.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(ValueError, match=r"needs transformers; pip install 'daypack\[models\]'"):
        load_model("gpt2")


@pytest.mark.parametrize("kind", ["bert", "t5", "vit", "mixtral", "mamba", "opt", "qwen2"])
def test_many_architectures_are_measured(kind):
    pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_layers": 2, "hidden_size": 128, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    spec = pretrained.from_config({"model_type": kind, **sizes, **heads}, kind)
    plan = plan_memory(spec, sequence=16, batch=2, optimizers=["gefen"])
    assert plan.activations.how == "measured", plan.notes
    assert plan.activations.peak > plan.activations.saved > 0


def test_a_checkpoint_by_its_header_alone(tmp_path):
    tensors = {"q_proj.weight": torch.zeros(64, 32, dtype=torch.bfloat16), "codes": torch.zeros(8, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save_file({"norm": torch.zeros(32)}, tmp_path / "b.safetensors")
    spec = load_model(str(tmp_path))
    assert {(p.name, p.shape, p.dtype, p.trainable) for p in spec.params} == {
        ("q_proj.weight", (64, 32), torch.bfloat16, True),
        ("codes", (8,), torch.uint8, False),
        ("norm", (32,), torch.float32, True),
    }
    # The data may be missing: a header of a terabyte is as good as any.
    header = json.dumps({"w": {"dtype": "F32", "shape": [500_000, 500_000], "data_offsets": [0, 10**12]}}).encode()
    (tmp_path / "large.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert load_model(str(tmp_path / "large.safetensors")).elements == 250_000_000_000


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", struct.pack("<Q", 5) + b"[1,2]", struct.pack("<Q", 2**60), struct.pack("<Q", 9) + b'{"a": {}}',
     struct.pack("<Q", 37) + b'{"a": {"dtype": "F3", "shape": [1,2]}}'],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file of a model's weights"):
        load_model(str(tmp_path / "x.safetensors"))


def test_a_function(module):
    spec = load_model(f"{module}:net", sample="8")
    assert spec.elements == 36
    assert all(isinstance(spec.module, nn.Module) and p.is_meta for p in spec.module.parameters())
    assert plan_memory(spec, batch=3, optimizers=["sgd"]).activations.saved >= 3 * 8 * 4
    assert plan_memory(load_model(f"{module}:pair"), optimizers=["sgd"]).activations.how == "measured"
    assert plan_memory(load_model(f"{module}:net"), optimizers=["sgd"]).activations.how == "unknown"
    for text, problem in (
        (f"{module}:broken", "failed: RuntimeError: no such"),
        (f"{module}:number", "must return a torch.nn.Module, got int"),
        (f"{module}:missing", "has no attribute 'missing'"),
        ("no_such_module_here:x", "No module named"),
    ):
        with pytest.raises(ValueError, match=problem):
            load_model(text)
    for sample in ("3,4", "3x0"):
        with pytest.raises(ValueError, match=f"cannot read the sample '{sample}'"):
            load_model(f"{module}:net", sample=sample)
    with pytest.raises(ValueError, match="leave --sample out"):
        load_model(f"{module}:pair", sample="8")
    with pytest.raises(
        ValueError, match=r"net does not run on the sample 9: RuntimeError: .*; correct it, or leave it out"
    ):
        plan_memory(load_model(f"{module}:net", sample="9"), optimizers=["sgd"])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not a model's configuration"),
        ("config.json", "{}", "names no model_type"),
        ("config.json", '{"model_type": "nothing"}', "transformers cannot build"),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', "transformers cannot build"),
        ("readme.txt", "", "cannot tell what"),
    ],
)
def test_bad_files(tmp_path, name, content, problem):
    pytest.importorskip("transformers")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=problem):
        load_model(str(tmp_path / name))


def test_missing_files(tmp_path):
    for text in ("nowhere/config.json", "nowhere.safetensors", "some/where"):
        with pytest.raises(ValueError, match="there is no file"):
            load_model(text)
    with pytest.raises(ValueError, match="neither a config"):
        load_model(str(tmp_path))


def test_a_count_says_that_it_is_a_stand_in():
    spec = from_count("350M")
    assert spec.elements == 350_000_000
    assert "stand-in" in spec.notes[0]
    assert sources.llama_like(7)[0]


def test_optimizer_state_is_no_model(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = daypack.Gefen([("w", p)])
    daypack.materialize_state(optimizer)
    daypack.checkpoint.save_file(optimizer, tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="holds optimizer state; give the weights"):
        load_model(str(tmp_path / "state.safetensors"))


@pytest.mark.parametrize("model", ["7B", "llama", None, 7])
def test_names_are_for_the_command_line(model: Any) -> None:
    with pytest.raises(ValueError, match="plan takes a module, shapes, or what"):
        daypack.plan(model)
