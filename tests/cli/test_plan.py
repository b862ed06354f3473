from __future__ import annotations

import json
from pathlib import Path

import pytest

import daypack
from daypack.cli import run


def test_the_table_the_advice_and_the_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "bars.png"
    assert run(["plan", "--params", "7B", "--gpu", "h100", "--gradient-checkpointing", "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "\x1b" not in shown.out
    assert "…" not in shown.out
    for word in ("28.00", "56.00", "largest", "gefen fits with", "where adamw lacks", "stand-in", "7 B parameters"):
        assert word in shown.out
    for name in daypack.names():
        assert name in shown.out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--params", "1.3e9", "--memory", "24GiB", "--gpus", "8", "--parallel", "fsdp2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["parameters"] == 1_300_000_000
    assert content["memory"] == 24 * 2**30
    assert content["parallel"] == "fsdp2"
    assert {row["optimizer"] for row in content["rows"]} == set(daypack.names())
    adamw = next(row for row in content["rows"] if row["optimizer"] == "adamw")
    assert adamw["weights"] == pytest.approx(4 * 1.3e9 / 8, rel=1e-3)
    assert adamw["fits"] is True


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give a model or --params"),
        (["x", "--params", "7B"], "and not both"),
        (["--params", "seven"], "cannot read the number of parameters 'seven'"),
        (["--params", "7B", "--gpu", "abacus"], "unknown GPU 'abacus'"),
        (["--params", "7B", "--memory", "much"], "cannot read the size 'much'"),
        (["--params", "7B", "--weights", "int3"], "unknown dtype 'int3'"),
        (["--params", "7B", "--optimizers", "adamw,magic"], "unknown optimizer 'magic'"),
        (["--params", "7B", "--optimizers", "gefen:block_size=0"], "block_size"),
        (["--params", "7B", "--attention", "none"], "--attention must be"),
        (["--params", "7B", "--gpus", "-1"], "gpus must be at least 1"),
        (["--params", "7B", "--parallel", "tensor"], "unknown kind of parallelism"),
        (["--params", "7B", "--plot", "bars.svg"], "--plot writes PNG"),
        (["nowhere/config.json"], "there is no file"),
        (["torch.nn:Linear"], "torch.nn:Linear failed: TypeError"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert problem in shown.err


def test_galore_without_a_rank_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--params", "1B", "--optimizers", "galore,galore:rank=128"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- galore")]
    assert notes == ["- galore: without a rank nothing is projected; plan it as galore:rank=128"]


def test_a_terminal_gets_json_without_escape_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run(["plan", "--params", "1B", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert json.loads(shown)["model"] == "1B"
