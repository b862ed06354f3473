"""Commands on files of optimizer state, as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import daypack
from daypack.checkpoint import load_file, save_file
from daypack.cli import run
from daypack.lab import build_model, model_config
from tests.conformance.scene import assert_same, parameters, state_of, train

from .test_commands import SMALL
from .test_commands import data as data


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, daypack.Gefen, dict[str, torch.nn.Parameter]]:
    params = parameters()
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(2))
    save_file(optimizer, tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors", optimizer, params


def test_split_and_consolidate(saved: tuple[Path, daypack.Gefen, object], tmp_path: Path) -> None:
    path, _, _ = saved
    assert run(["split", str(path), "3", str(tmp_path / "parts")]) == 0
    parts = sorted(map(str, (tmp_path / "parts").glob("*-of-*")))
    assert len(parts) == 3
    for given in (parts, [str(tmp_path / "parts" / path.name)], [*parts, str(tmp_path / "parts" / path.name)]):
        assert run(["consolidate", *given, str(tmp_path / "again.safetensors")]) == 0
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
        (tmp_path / "again.safetensors").unlink()


def test_convert_a_training_checkpoint_and_go_on(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--data", str(data), "--out", str(tmp_path), "--optimizer", "adamw", "--name", "job"]
    assert run(["train", *SMALL, *runs]) == 0
    checkpoint, out = str(tmp_path / "job" / "checkpoint.pt"), tmp_path / "gefen.safetensors"
    capsys.readouterr()
    assert run(["convert", checkpoint, str(out), "--to", "gefen", "--option", "block_size=128"]) == 0
    assert "requantised" in capsys.readouterr().out
    model = build_model("tiny", 0)
    optimizer = daypack.Gefen(daypack.param_groups(model), block_size=128)
    load_file(optimizer, out)
    assert all(state["step"] == 8 for state in optimizer.state.values())
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    back = tmp_path / "back.safetensors"
    assert run(["convert", str(out), str(back), "--to", "adamw", "--table"]) == 0
    assert "embedding.weight" in capsys.readouterr().out

    wider = tmp_path / "wider.safetensors"
    assert run(["transplant", checkpoint, "tiny,layers=3,mlp_hidden=264", str(wider)]) == 0
    printed = capsys.readouterr().out
    assert "grown" in printed
    assert "new" in printed
    model = build_model(model_config("tiny", layers=3, mlp_hidden=264), 0)
    adamw = daypack.AdamW(daypack.param_groups(model))
    load_file(adamw, wider)
    states = {name: adamw.state.get(p) for name, p in model.named_parameters()}
    assert states["blocks.0.mlp.up_proj.weight"]["step"] == 8
    assert not states["blocks.2.mlp.up_proj.weight"]
    assert adamw.param_groups[0]["weight_decay"] == 0.1


def test_convert_what_torch_saved(
    saved: tuple[Path, daypack.Gefen, dict[str, torch.nn.Parameter]], tmp_path: Path
) -> None:
    _, optimizer, params = saved
    for content, name in (
        (optimizer.state_dict(), "bare"),
        ({"model": {}, "optimizer": optimizer.state_dict()}, "held"),
    ):
        torch.save(content, tmp_path / f"{name}.pt")
        assert (
            run(["convert", str(tmp_path / f"{name}.pt"), str(tmp_path / f"{name}.safetensors"), "--to", "gefen"]) == 0
        )
        mine = parameters()
        other = daypack.Gefen(mine.items())
        load_file(other, tmp_path / f"{name}.safetensors")
        assert_same(state_of(other, mine), state_of(optimizer, params))


def grown_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 20))


def test_transplant_into_the_users_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = parameters(shapes={"layer.0.weight": (32, 64), "layer.0.bias": (32,)})
    optimizer = daypack.AdamW(params.items(), weight_decay=0.3)
    train(optimizer, params, range(2))
    save_file(optimizer, tmp_path / "old.safetensors")
    arguments = ["transplant", str(tmp_path / "old.safetensors"), "tests.cli.test_state:grown_model"]
    assert run([*arguments, str(tmp_path / "new.safetensors"), "--rename", "layer.*=*", "--to", "gefen"]) == 0
    assert "grown" in capsys.readouterr().out
    model = grown_model()
    new = daypack.Gefen(daypack.param_groups(model))
    load_file(new, tmp_path / "new.safetensors")
    state = new.state[dict(model.named_parameters())["0.bias"]]
    assert_same(state["exp_avg"][:32], optimizer.state[params["layer.0.bias"]]["exp_avg"])
    assert new.param_groups[0]["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["consolidate", "x.safetensors"], "give the shards"),
        (["consolidate", "missing.safetensors", "out.safetensors"], "no checkpoint at"),
        (["split", "missing.safetensors", "2", "parts"], "no checkpoint at"),
        (["split", "state.safetensors", "0", "parts"], "at least 1"),
        (["split", "state.safetensors", "301", "parts"], "at most 300"),
        (["split", "state.safetensors", "99999999999", "parts"], "at most 300"),
        (["split", "state.safetensors", "2", "."], "exists; give another folder"),
        (["convert", "missing.pt", "out.safetensors", "--to", "gefen"], "no checkpoint at"),
        (["convert", "state.safetensors", "out.safetensors"], "--to"),
        (["convert", "state.safetensors", "out.safetensors", "--to", "adamw", "--from", "adamw"], "Gefen saved it"),
        (
            ["convert", "state.safetensors", "out.safetensors", "--to", "adamw", "--from", "x"],
            "state of x is not known",
        ),
        (
            ["convert", "bare.pt", "out.safetensors", "--to", "adamw", "--from", "adamw"],
            "AdamW keeps exp_avg, exp_avg_sq",
        ),
        (["convert", "bare.pt", "out.safetensors", "--to", "adamw", "--from", "sgd"], "SGD keeps momentum_buffer"),
        (["convert", "bare.pt", "out.safetensors", "--to", "adamw", "--from", "adamw8bit"], "AdamW8bit keeps"),
        (["convert", "state.safetensors", "out.safetensors", "--to", "nothing"], "unknown optimizer 'nothing'"),
        (["convert", "state.safetensors", "state.safetensors", "--to", "adamw"], "exists"),
        (["convert", "state.safetensors", "no/out.safetensors", "--to", "adamw"], "not a folder"),
        (["convert", "state.safetensors", "out.safetensors", "--to", "gefen", "--option", "bits"], "--option 'bits'"),
        (["convert", "state.safetensors", "out.safetensors", "--to", "gefen", "--option", "bits=3"], "bits"),
        (["convert", "state.safetensors", "out.safetensors", "--to", "gefen", "--option", "bots=3"], "bots"),
        (["convert", "junk.pt", "out.safetensors", "--to", "gefen"], "damaged or unknown"),
        (["convert", "code.pt", "out.safetensors", "--to", "gefen"], "damaged or unknown"),
        (["transplant", "state.safetensors", "gigantic", "out.safetensors"], "unknown model"),
        (["transplant", "state.safetensors", "tiny,width=3", "out.safetensors"], "width"),
        (["transplant", "state.safetensors", "nowhere:model", "out.safetensors"], "cannot get the model"),
        (["transplant", "state.safetensors", "os:getcwd", "out.safetensors"], "not a torch.nn.Module"),
        (["transplant", "state.safetensors", "tiny", "out.safetensors", "--heads", "a=1"], "--heads"),
        (
            ["transplant", "state.safetensors", "tiny", "out.safetensors", "--heads", "*.quary.weight=0:4:8"],
            "no parameter",
        ),
        (["transplant", "state.safetensors", "tiny", "out.safetensors", "--rename", "vektor=v"], "like it are vector"),
        (["transplant", "missing.pt", "tiny", "state.safetensors", "--to", "gefn"], "unknown optimizer 'gefn'"),
        (["transplant", "missing.pt", "tiny", "state.safetensors", "--heads", "a=1"], "--heads"),
        (["transplant", "missing.pt", "tin", "state.safetensors"], "unknown model"),
        (["transplant", "missing.pt", "tiny", "state.safetensors"], "exists"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: list[str],
    word: str,
    saved: tuple[Path, daypack.Gefen, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("junk.pt").write_bytes(b"PK\x03\x04 this is no checkpoint")
    torch.save({"state": {}, "param_groups": [Path("a pickled object")]}, "code.pt")
    torch.save(saved[1].state_dict(), "bare.pt")
    files = sorted(tmp_path.rglob("*"))
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == files


def test_what_is_required_is_shown_as_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "convert --to NAME [OPTIONS]" in shown, shown


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("consolidate", "split", "convert", "transplant"):
        assert run([command, "--help"]) == 0
        assert f"Example: daypack {command}" in " ".join(capsys.readouterr().out.split())
