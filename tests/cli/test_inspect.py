"""`daypack inspect` and `daypack diff`, as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import daypack
from daypack.checkpoint import save_file, split
from daypack.cli import run
from tests.conformance.scene import Params, parameters, train
from tests.processes import python

from .test_commands import SMALL, refused
from .test_commands import data as data

LONG = "transformer.blocks.11.attention." + "very_" * 20 + "long_projection.weight"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any, Params]:
    params = parameters() | parameters(shapes={LONG: (32, 300)})
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(3))
    save_file(optimizer, tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors", optimizer, params


def test_inspect_a_run(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", *SMALL, "--data", str(data), "--out", str(tmp_path), "--name", "job"]) == 0
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "job"), "--sort", "bytes"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'job' / 'checkpoint.pt'}: Gefen (rule adamw), 21 parameters, ")
    rows = [line.split() for line in lines if line.startswith(("blocks.", "head.", "embedding.", "norm."))]
    assert len(rows) == 21
    sizes = [_bytes(row) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert any("the learning rate is 0" in line for line in lines)
    assert run(["inspect", str(tmp_path / "job"), "--match", "*.mlp.*", "--match", "head*", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["parameters"]) == 7
    assert content["parameters_in_all"] == 21
    assert content["weights"] is True


def _bytes(row: list[str]) -> int:
    """The first whole number with a thousands separator, or of three digits, behind the shape."""
    return next(int(cell.replace(",", "")) for cell in row[2:] if re.fullmatch(r"\d{1,3}(,\d{3})+|\d{3}", cell))


def test_what_is_piped_is_plain_whole_and_loadable(saved: tuple[Path, Any, Params]) -> None:
    path, optimizer, _ = saved
    code = "import runpy; runpy.run_module('daypack', run_name='__main__', alter_sys=True)"
    done = python(code, "inspect", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if line.startswith(LONG))
    assert "32x300" in row
    assert "8-bit learned/256 + factored" in row
    assert done.stdout.splitlines()[-1] == "no warnings"
    done = python(code, "inspect", str(path), "--json")
    assert "\x1b" not in done.stdout
    content = json.loads(done.stdout)
    assert content["total"]["bytes"] == daypack.state_report(optimizer).total_bytes
    assert content["parameters"][-1]["name"] == LONG


def test_every_order(saved: tuple[Path, Any, Params], capsys: pytest.CaptureFixture[str]) -> None:
    from daypack.inspection import inspect_state
    from daypack.inspection.table import SORTS

    params = {param.name: param for param in inspect_state(saved[0]).params}
    for name, (key, largest) in SORTS.items():
        assert run(["inspect", str(saved[0]), "--sort", name]) == 0
        table = capsys.readouterr().out.split("\n\n")[1].splitlines()[3:]
        names = [line.split()[0] for line in table]
        assert sorted(names) == sorted(params)
        values: list[Any] = [key(params[each]) for each in names]
        assert values == sorted(values, reverse=largest)


def test_a_narrow_terminal_drops_columns_and_says_so(saved: tuple[Path, Any, Params]) -> None:
    from daypack.inspection import inspect_state
    from daypack.inspection.table import inspection_table

    params = inspect_state(saved[0]).params
    widths: list[int] = []

    def fits(table: Any) -> bool:
        widths.append(len(table.columns))
        return len(table.columns) <= 7

    table, dropped = inspection_table(params, fits)
    assert len(table.columns) == 7
    assert dropped[:2] == ("bytes", "role")
    assert widths == sorted(widths, reverse=True)
    assert [column.header for column in table.columns][:2] == ["parameter", "shape"]


def test_warnings_come_last_and_do_not_change_the_exit_code(
    saved: tuple[Path, Any, Params], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, optimizer, params = saved
    optimizer.state[params[LONG]]["exp_avg_scale"][3, 0] = float("nan")
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "nan.pt")
    assert run(["inspect", str(tmp_path / "nan.pt")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"warning: not finite: {LONG}: exp_avg_scale holds 1 value that is NaN or infinite"
    assert run(["inspect", str(tmp_path / "nan.pt"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["warnings"] == [
        {"param": LONG, "kind": "not finite", "text": "exp_avg_scale holds 1 value that is NaN or infinite"}
    ]


def test_diff_has_the_exit_codes_of_diff(
    saved: tuple[Path, Any, Params], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, optimizer, params = saved
    split(path, 2, tmp_path / "parts")
    assert run(["diff", str(path), str(tmp_path / "parts")]) == 0
    assert "equal: 11 parameters, every bit of their state" in capsys.readouterr().out
    optimizer.param_groups[0]["lr"] = 0.5
    train(optimizer, params, [3])
    save_file(optimizer, tmp_path / "later.safetensors")
    assert run(["diff", str(path), str(tmp_path / "later.safetensors")]) == 1
    shown = capsys.readouterr().out
    assert "lr: 0.001 -> 0.5 (11 parameters)" in shown
    assert "step: 3 -> 4 (11 parameters)" in shown
    assert "0 of 11 parameters have the same state to the bit" in shown
    assert any(line.startswith(LONG) and line.rstrip().endswith("differ") for line in shown.splitlines())
    assert run(["diff", str(path), str(tmp_path / "later.safetensors"), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["equal"] is False
    assert content["options"] == [{"option": "lr", "a": 0.001, "b": 0.5, "parameters": 11}]
    assert run(["diff", str(path), str(tmp_path / "missing")]) == 2
    refused(capsys, "no checkpoint at")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["inspect", "missing.pt"], "no checkpoint at missing.pt"),
        (["inspect", "notes.txt"], "damaged or unknown checkpoint notes.txt"),
        (["inspect", "code.pt"], "damaged or unknown checkpoint code.pt"),
        (["inspect", "model.pt"], "not the state of an optimizer"),
        (["inspect", "empty"], "should hold one file of optimizer state"),
        (["inspect", "dcp"], "dcp_to_torch"),
        (["inspect", "state.safetensors", "--match", "x*"], "no parameter matches x*"),
        (["inspect", "state.safetensors", "--sort", "size"], "--sort must be one of name, bytes"),
        (["inspect", "state.safetensors", "--weights", "notes.txt"], "damaged or unknown"),
        (["inspect", "state.safetensors", "--html", "page.txt"], "--html writes HTML files"),
        (["inspect", "state.safetensors", "--html", "no/page.html"], "no is not a folder"),
        (["inspect", "cut.safetensors"], "damaged or foreign checkpoint"),
        (["diff", "state.safetensors", "notes.txt"], "damaged or unknown checkpoint"),
        (["diff", "state.safetensors"], "daypack diff --help"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: list[str],
    word: str,
    saved: tuple[Path, Any, Params],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("a text file\n")
    torch.save({"state": {}, "param_groups": [Path("a pickled object")]}, "code.pt")
    torch.save({name: p.detach() for name, p in saved[2].items()}, "model.pt")
    Path("cut.safetensors").write_bytes(saved[0].read_bytes()[:-100])
    for folder in ("empty", "dcp"):
        Path(folder).mkdir()
    Path("dcp/.metadata").touch()
    files = sorted(tmp_path.rglob("*"))
    assert run(arguments) == 2
    refused(capsys, word)
    assert sorted(tmp_path.rglob("*")) == files


def test_help_documents_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 if the states are equal in all of it, 1 if they differ, 2 on an error" in shown
    assert run(["inspect", "--help"]) == 0
    assert "Example: daypack inspect runs/gefen" in " ".join(capsys.readouterr().out.split())
