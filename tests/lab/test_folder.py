from __future__ import annotations

import json
from pathlib import Path

import pytest

from daypack.lab import Record
from daypack.lab.folder import (
    RecordWriter,
    has_records,
    job_in,
    require_free,
    require_resumable,
    rewind_records,
    run_folder,
    staged,
    write_report,
)
from tests.lab.samples import PROVENANCE, comparison
from tests.lab.texts import config


def record(step: int, validation: float | None = None) -> Record:
    return Record(step, 5.0, 1e-3, None, 1.0, float(step), validation)


def fill(stage: Path) -> None:
    with RecordWriter(stage) as writer:
        writer.write(config(), record(1))
    write_report(stage, "compare", PROVENANCE, comparison())


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "/a"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(ValueError, match="--name must be a plain folder name"):
        run_folder(Path("runs"), name)


def test_a_finished_comparison_moves_into_place_and_replaces_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    for _ in range(2):
        require_free(folder, "compare")
        with staged(folder) as stage:
            fill(stage)
        (folder / "notes.txt").write_text("mine")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "notes.txt",
        "report.html",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["demo"]
    assert job_in(folder) == "compare"
    assert json.loads((folder / "config.json").read_text())["runs"][1]["config"]["optimizer"] == "gefen"


def test_a_failed_comparison_changes_nothing_but_keeps_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with staged(folder) as stage:
        fill(stage)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RuntimeError), staged(folder) as empty:
        raise RuntimeError
    assert not empty.exists()
    with pytest.raises(OSError, match="disk full"), staged(folder) as stage:  # noqa: PT012
        fill(stage)
        raise OSError("disk full")
    assert has_records(stage)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    require_free(tmp_path / "new", "train")
    require_free(tmp_path, "train")
    (tmp_path / "thesis.txt").write_text("mine")
    for job in ("train", "compare"):
        with pytest.raises(ValueError, match=f"exists and was not written by daypack {job}; choose another --name"):
            require_free(tmp_path, job)
    (tmp_path / "config.json").write_text('{"job": "train"}')
    with pytest.raises(ValueError, match="go on with --resume"):
        require_free(tmp_path, "train")
    with pytest.raises(ValueError, match="not written by daypack compare"):
        require_free(tmp_path, "compare")
    require_resumable(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="files that daypack train did not write"):
        require_resumable(tmp_path)
    (tmp_path / "config.json").unlink()
    require_resumable(tmp_path)


def test_records_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(config(optimizer="adamw", seed=3), record(step, 2.0 if step == 2 else None))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # what a kill leaves
    assert rewind_records(tmp_path, 4) == [record(1), record(2, 2.0), record(3), record(4)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert (lines[0]["optimizer"], lines[0]["seed"]) == ("adamw", 3)
    assert rewind_records(tmp_path, 9) == [record(1), record(2, 2.0), record(3), record(4)]
    assert rewind_records(tmp_path / "elsewhere", 4) == []
