"""Where state and weights are found, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import daypack
from daypack.checkpoint import save_file, split

from ..conformance.scene import Params, parameters, train

Saved = tuple[daypack.Gefen, Params]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    params = parameters()
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(2))
    save_file(optimizer, tmp_path / "state.safetensors")
    return optimizer, params


def comparable(source: Any, **options: Any) -> list[dict[str, Any]]:
    """All that is measured of parameters, without their weights."""
    found: list[dict[str, Any]] = daypack.inspect_state(source, **options).to_dict()["parameters"]
    return [{key: value for key, value in param.items() if key not in ("weight", "ratio")} for param in found]


def test_every_form_of_one_state_is_the_same(saved: Saved, tmp_path: Path) -> None:
    optimizer, params = saved
    wanted = comparable(optimizer)
    whole = tmp_path / "state.safetensors"
    split(whole, 3, tmp_path / "parts")
    weights = {name: p.detach() for name, p in params.items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    torch.save({"state_dict": weights, "optim": optimizer.state_dict()}, tmp_path / "also.pt")
    (tmp_path / "alone").mkdir()
    whole.rename(tmp_path / "alone" / "state.safetensors")
    for source in (
        tmp_path / "alone",
        tmp_path / "parts",
        tmp_path / "parts" / "state.safetensors",
        tmp_path / "parts" / "state-00002-of-00003.safetensors",
        optimizer.state_dict(),
        tmp_path / "both.pt",
        str(tmp_path / "also.pt"),
    ):
        assert comparable(source) == wanted, source
    assert daypack.inspect_state(tmp_path / "both.pt").weights
    assert daypack.inspect_state(tmp_path / "also.pt").params == daypack.inspect_state(optimizer).params


def test_weights_from_a_file(saved: Saved, tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_tensors

    optimizer, params = saved
    wanted = daypack.inspect_state(optimizer).params
    weights = {name: p.detach() for name, p in params.items()}
    save_tensors(weights, tmp_path / "model.safetensors")
    torch.save({f"module.{name}": value for name, value in weights.items()}, tmp_path / "model.pt")
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    for file in ("model.safetensors", "model.pt", "both.pt"):
        assert daypack.inspect_state(tmp_path / "state.safetensors", tmp_path / file).params == wanted
    assert daypack.inspect_state(tmp_path / "state.safetensors", weights).params == wanted
    other = {**weights, "matrix": torch.ones(3)}
    found = daypack.inspect_state(tmp_path / "state.safetensors", other)
    assert any("its weights have shape (3,), its state (24, 520)" in note for note in found.notes)
    assert [param.weight is None for param in found.params] == [param.name in ("matrix", "empty") for param in wanted]
    stranger = daypack.inspect_state(tmp_path / "state.safetensors", {"other": torch.ones(3)})
    assert not stranger.weights
    assert any("no name of the weights is one of the state" in note for note in stranger.notes)


def test_state_without_names_takes_those_of_weights_that_fit(tmp_path: Path) -> None:
    params = parameters(shapes={"a.weight": (8, 16), "a.bias": (8,), "b.weight": (4, 8)})
    optimizer = daypack.AdamW(params.values())
    train(optimizer, params, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    weights = {name: p.detach() for name, p in params.items()}
    found = daypack.inspect_state(tmp_path / "optim.pt", weights)
    assert [param.name for param in found.params] == list(weights)
    assert all(param.ratio for param in found.params)
    assert any("those of the weights are shown" in note for note in found.notes)
    reordered = {name: weights[name] for name in reversed(weights)}
    found = daypack.inspect_state(tmp_path / "optim.pt", reordered)
    assert [param.name for param in found.params] == ["0.0", "0.1", "0.2"]
    assert not found.weights
    assert any("not those of the weights in their order" in note for note in found.notes)


def test_a_distributed_checkpoint_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 20))
    optimizer = daypack.Gefen(model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 64)).square().sum().backward()
        optimizer.step()
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(ValueError, match=r"dcp_to_torch .*dcp state\.pt"):
        daypack.inspect_state(tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    found = daypack.inspect_state(tmp_path / "state.pt")
    assert {param.name for param in found.params} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert found.total.bytes == daypack.state_report(optimizer).total_bytes
    wanted = {param.name: param.moments for param in daypack.inspect_state(optimizer).params}
    assert {param.name: param.moments for param in found.params} == wanted


def test_what_is_no_state_is_refused(saved: Saved, tmp_path: Path) -> None:
    _, params = saved
    torch.save({name: p.detach() for name, p in params.items()}, tmp_path / "model.pt")
    torch.save({"state": {}, "param_groups": [Path("a pickled object")]}, tmp_path / "code.pt")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "nothing.pt")
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "empty").mkdir()
    for source, message in (
        ("missing", "no checkpoint at"),
        ("model.pt", "is not the state of an optimizer"),
        ("code.pt", "damaged or unknown checkpoint"),
        ("notes.txt", "damaged or unknown checkpoint"),
        ("empty", r"should hold one file of optimizer state, or the shards of one; it has none"),
        (".", "it has several: code.pt, model.pt"),
    ):
        with pytest.raises(ValueError, match=message):
            daypack.inspect_state(tmp_path / source)
    with pytest.raises(ValueError, match=r"the state is empty|not known"):
        daypack.inspect_state(tmp_path / "nothing.pt")
    with pytest.raises(ValueError, match="holds no weights"):
        daypack.inspect_state(tmp_path / "state.safetensors", tmp_path / "nothing.pt")
    with pytest.raises(ValueError, match="no weights at"):
        daypack.inspect_state(tmp_path / "state.safetensors", tmp_path / "missing")
    with pytest.raises(ValueError, match="Adagrad is not known"):
        daypack.inspect_state(torch.optim.Adagrad(params.values()))


def test_only_one_parameter_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Peak memory of reading a file of many parameters is that of few of them."""
    import subprocess
    import sys

    params = {f"layer{i}.weight": torch.nn.Parameter(torch.zeros(1024, 1024)) for i in range(24)}
    optimizer = daypack.AdamW(params.items())
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    save_file(optimizer, tmp_path / "state.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    code = """
import resource, sys, daypack, torch
torch.set_num_threads(1)
from daypack.inspection import inspect_state
def private():
    fields = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
inspect_state(sys.argv[1], match=["layer0.*"])
before, largest = private(), 0
import daypack.inspection.measure as measure
param = measure._param
def watched(*arguments):
    global largest
    result = param(*arguments)
    largest = max(largest, private())
    return result
measure._param = watched
inspect_state(sys.argv[1])
print(largest - before)
"""
    for file in ("state.safetensors", "state.pt"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / file)], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) < 48 << 20, file  # the state has 192 MiB, one parameter 8


def test_shards_of_a_second_save(saved: Saved, tmp_path: Path) -> None:
    """They have other names than those that they replace; the folder and each of them stand for the whole."""
    optimizer, params = saved
    split(tmp_path / "state.safetensors", 2, tmp_path / "parts")
    train(optimizer, params, [2])
    save_file(optimizer, tmp_path / "state.safetensors")
    shards = split(tmp_path / "state.safetensors", 2, tmp_path / "parts")
    assert shards[0].name == "state-00001-of-00002b.safetensors"
    wanted = comparable(optimizer)
    for source in (tmp_path / "parts", *shards):
        assert comparable(source) == wanted, source


def test_other_files_with_numbers_in_their_names_are_taken_as_they_are(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(2, 4))
    optimizer = daypack.AdamW([p])
    p.grad = torch.ones(2, 4)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "opt-1-of-2.pt")
    for source in (tmp_path, tmp_path / "opt-1-of-2.pt"):
        assert daypack.inspect_state(source).source == str(tmp_path / "opt-1-of-2.pt")


def test_files_of_torch_before_its_zip_format(tmp_path: Path) -> None:
    p = torch.nn.Parameter(torch.ones(2, 4))
    optimizer = daypack.AdamW([p])
    p.grad = torch.ones(2, 4)
    optimizer.step()
    file = tmp_path / "old.pt"
    torch.save(optimizer.state_dict(), file, _use_new_zipfile_serialization=False)
    assert comparable(file) == comparable(optimizer.state_dict())
    data = file.read_bytes()
    place = data.index(b"storage") + 20
    for damaged in (data[: len(data) // 2], data[:place] + b"?" + data[place + 1 :], data[:-9]):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged or unknown checkpoint"):
            daypack.inspect_state(file)


def test_mappings_that_are_no_state_are_refused() -> None:
    for mapping in ({}, torch.nn.Linear(2, 2).state_dict()):
        with pytest.raises(ValueError, match="this mapping is not the state of an optimizer; pass its state_dict"):
            daypack.inspect_state(mapping)
    with pytest.raises(ValueError, match="is not a state_dict as optimizers save it"):
        daypack.inspect_state({"state": {}, "param_groups": [3]})


def test_measuring_takes_little_more_memory_than_one_parameter() -> None:
    """The highest point of the process, not what it holds between parameters, beside the 64 MiB of state themselves."""
    import subprocess
    import sys

    code = """
import resource, torch, daypack
torch.set_num_threads(1)
def state(n):
    moments = {"exp_avg": torch.ones(n, 1024).bfloat16(), "exp_avg_sq": torch.ones(n, 1024, dtype=torch.bfloat16)}
    group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    return {"state": {0: {"step": torch.tensor(3.0), **moments}}, "param_groups": [group]}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
daypack.inspect_state(state(1024), optimizer="adamw")
large = state(16)
for moment in ("exp_avg", "exp_avg_sq"):
    large["state"][0][moment] = torch.ones(16 << 10, 1024, dtype=torch.bfloat16)
before = peak()
daypack.inspect_state(large, optimizer="adamw")
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 160 << 20


@pytest.mark.parametrize("kept", [0.01, 0.1, 0.5, 0.99])
def test_a_checkpoint_that_was_cut_short_is_named(saved: Saved, tmp_path: Path, kept: float) -> None:
    optimizer, _ = saved
    torch.save(optimizer.state_dict(), tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=r"cut\.pt"):
        daypack.inspect_state(tmp_path / "cut.pt")
