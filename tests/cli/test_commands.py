from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

import daypack
from daypack.cli import run
from tests.lab.texts import text
from tests.processes import join, start

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = ["--model", "tiny", "--steps", "8", "--batch", "2", "--context", "16", "--eval-every", "4", "--threads", "1"]
COMMAND = "import daypack.cli; daypack.cli.main()"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(text())
    return path


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def readings(folder: Path) -> dict[tuple[int, str], float]:
    """What was read at each step under each tag, times apart."""
    lines = [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]
    return {(line["step"], line["tag"]): line["value"] for line in lines if "optimizer/step_" not in line["tag"]}


def checkpoint(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return content


def without_progress(errors: str) -> list[str]:
    """Lines of stderr but those that say how far a run is."""
    return [
        line for line in errors.splitlines() if not re.fullmatch(r".*: (step \d+/\d+ .*|going on after step.*)", line)
    ]


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Bitwise equality of nested checkpoint content."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}/{index}")
    else:
        assert one == other, where


@pytest.mark.parametrize("task", ["images", "graph"])
def test_other_tasks_are_compared_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str) -> None:
    common = ["--task", task, "--model", "tiny", "--eval-every", "2", "--out", str(tmp_path)]
    assert run(["compare", *common, "--steps", "4", "--name", "x"]) == 0
    shown = capsys.readouterr()
    assert without_progress(shown.err) == []
    assert {"images": "nats/image", "graph": "nats/node"}[task] in shown.out
    assert "right" in shown.out
    assert all(0 <= line["accuracy"] <= 1 for line in records(tmp_path / "x") if line["validation"] is not None)
    assert run(["train", *common, "--steps", "4", "--name", "y", "--checkpoint-every", "2"]) == 0
    assert run(["train", "--resume", str(tmp_path / "y"), "--task", "text"]) == 2
    assert f"--task text does not match {tmp_path / 'y' / 'checkpoint.pt'}" in capsys.readouterr().err
    assert run(["train", "--resume", str(tmp_path / "y")]) == 0


def test_compare_writes_what_it_shows(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    arguments = ["compare", *SMALL, "--data", str(data), "--out", str(out), "--name", "x", "--seeds", "2"]
    assert run([*arguments, "--optimizers", "adamw,gefen", "--lr", "adamw=2e-3,gefen=1e-3"]) == 0
    shown = capsys.readouterr()
    assert without_progress(shown.err) == []
    assert "\x1b" not in shown.out + shown.err
    assert "gefen, seed 1: step 8/8" in shown.err
    assert "step 8/8" not in shown.out
    assert "0.002" in shown.out
    assert "B/param" in shown.out
    folder = out / "x"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "loss.png", "metrics.jsonl", "report.html"]
    assert len(records(folder)) == 2 * 2 * 8
    content = json.loads((folder / "config.json").read_text())
    assert content["job"] == "compare"
    assert [(run["config"]["optimizer"], run["config"]["seed"], run["config"]["lr"]) for run in content["runs"]] == [
        ("adamw", 0, 2e-3),
        ("gefen", 0, 1e-3),
        ("adamw", 1, 2e-3),
        ("gefen", 1, 1e-3),
    ]
    for line in records(folder):
        assert line["loss"] > 0
    first = {line["optimizer"]: line["loss"] for line in records(folder) if (line["step"], line["seed"]) == (1, 1)}
    assert first["adamw"] == first["gefen"]
    # Once more under the same name: the earlier comparison is replaced.
    assert run([*arguments, "--optimizers", "sgd"]) == 0
    assert {line["optimizer"] for line in records(folder)} == {"sgd"}


@pytest.mark.parametrize("optimizer", ["adamw", "gefen", "adam_mini"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, data: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from daypack.lab import Job

    arguments = ["train", "--optimizer", optimizer, *SMALL, "--data", str(data), "--out", str(tmp_path / "runs")]
    arguments += ["--checkpoint-every", "3", "--monitor", "1"]
    assert run([*arguments, "--name", "straight"]) == 0
    advance = Job.advance

    def fail(job: Job) -> Any:
        if job.step == 5:
            raise RuntimeError("power cut")
        return advance(job)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "advance", fail)
        with pytest.raises(RuntimeError, match="power cut"):
            run([*arguments, "--name", "cut"])
    straight, cut = tmp_path / "runs" / "straight", tmp_path / "runs" / "cut"
    assert checkpoint(cut)["step"] == 3
    capsys.readouterr()
    with (cut / "monitor.jsonl").open("a") as file:
        file.write('{"step": 5, "ta')  # cut short by the power
    assert run(["train", "--resume", str(cut), "--checkpoint-every", "3", "--monitor", "1"]) == 0
    assert "going on after step 3 of 8" in capsys.readouterr().err
    varying = {"seconds", "optimizer_ms"}
    one, other = ([{k: v for k, v in line.items() if k not in varying} for line in records(f)] for f in (straight, cut))
    assert one == other
    one, other = ({k: v for k, v in checkpoint(folder).items() if k != "seconds"} for folder in (straight, cut))
    assert_same(one, other)
    one, other = (readings(folder) for folder in (straight, cut))
    assert one == other
    assert [step for step, tag in one if tag == "optimizer/update_rms"] == list(range(1, 9))
    assert (cut / "report.html").exists()
    assert (cut / "loss.png").exists()
    # A finished run can be asked to go on; there is nothing to do, and that is no error.
    assert run(["train", "--resume", str(cut / "checkpoint.pt")]) == 0


def test_a_batch_that_no_memory_holds_is_one_line(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from daypack.lab import Job

    monkeypatch.setattr(Job, "advance", lambda job: torch.empty(1 << 60, dtype=torch.uint8))
    assert run(["compare", *SMALL, "--data", str(data), "--out", str(tmp_path / "runs")]) == 2
    refused(capsys, "not enough memory: 1,152,921,504,606,846,976 bytes in one piece", "smaller --batch")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_diverges_says_so_and_fails(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", *SMALL, "--data", str(data), "--out", str(tmp_path), "--optimizer", "sgd", "--lr", "1e30"]
    assert run(arguments) == 1
    shown = capsys.readouterr()
    assert without_progress(shown.err) == ["daypack: the run diverged: its loss is not finite; try a lower --lr"]
    assert "diverged" in shown.out
    assert (tmp_path / "sgd" / "report.html").exists()


@pytest.mark.filterwarnings("ignore:the gradient of parameter")
def test_a_run_whose_gradients_are_passed_over_has_diverged_too(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *SMALL, "--data", str(data), "--out", str(tmp_path), "--optimizer", "gefen", "--lr", "1e30"]
    assert run(arguments) == 1
    assert "daypack: the run diverged: most gradients were not finite; try a lower --lr" in capsys.readouterr().err


def test_a_checkpoint_without_optimizer_state_warns_in_one_line(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs"
    assert run(["train", "--optimizer", "adamw", *SMALL, "--data", str(data), "--out", str(out)]) == 0
    content = checkpoint(out / "adamw")
    del content["optimizer"]
    torch.save({**content, "step": 4}, out / "adamw" / "checkpoint.pt")
    capsys.readouterr()
    assert run(["train", "--resume", str(out / "adamw")]) == 0
    lines = without_progress(capsys.readouterr().err)
    assert len(lines) == 1
    assert lines[0].startswith("daypack: warning: ")
    assert "the moments restart from zero at step 4" in lines[0]


BAD_INPUT: list[tuple[list[str], list[str]]] = [
    (["compare", "--optimizers", "adamw,nosuch"], ["nosuch", "gefen"]),
    (["compare", "--optimizers", ","], ["optimizers"]),
    (["compare", "--optimizers", "sgd,sgd"], ["sgd, sgd"]),
    (["compare", "--lr", "fast"], ["--lr 'fast'", "2e-3"]),
    (["compare", "--lr", "adamw=1e-3"], ["--lr adamw=1e-3", "gefen"]),
    (["compare", "--steps", "-5"], ["steps", "-5"]),
    (["compare", "--steps", "many"], ["--steps", "daypack compare --help"]),
    (["compare", "--seeds", "0"], ["seeds", "0"]),
    (["compare", "--device", "warp"], ["'warp'", "--device cpu"]),
    (["compare", "--dtype", "float8"], ["'float8'", "bfloat16"]),
    (["compare", "--model", "huge"], ["'huge'", "tiny"]),
    (["compare", "--data", "nowhere.txt"], ["nowhere.txt", "check the path"]),
    (["compare", "--data", "EMPTY"], ["empty corpus"]),
    (["compare", "--context", "1000000"], ["corpus too small", "shorter context"]),
    (["compare", "--task", "sound"], ["'sound'", "text, images, graph"]),
    (["compare", "--task", "graph", "--model", "large"], ["'large'", "tiny, small, medium"]),
    (["compare", "--task", "images", "--data", "EMPTY"], ["leave --data out"]),
    (["compare", "--task", "images", "--parallel", "ddp"], ["'ddp'", "text task"]),
    (["train", "--task", "graph", "--parallel", "fsdp2"], ["'fsdp2'", "text task"]),
    (["compare", "--name", "../x"], ["--name", "'../x'"]),
    (["compare", "--nosuch"], ["--nosuch", "daypack compare --help"]),
    (["nosuch"], ["nosuch", "see daypack --help"]),
    (["train", "--threads", "100000"], ["threads must be at most 1024, got 100000"]),
    (["train", "--batch", "99999999999999999999999"], ["batch must be at most 2147483647"]),
    (["train", "--resume", "nowhere", "--name", "x"], ["leave --out out"]),
    (["train", "--optimizer", "nosuch"], ["nosuch", "gefen"]),
    (["train", "--checkpoint-every", "0"], ["--checkpoint-every", "0"]),
    (["train", "--monitor", "0"], ["--monitor", "0"]),
    (["train", "--lr", "-1"], ["lr", "-1"]),
    (["train", "--data", "nowhere.txt"], ["nowhere.txt"]),
    (["train", "--resume", "nowhere"], ["nowhere"]),
    (["train", "--device", "warp"], ["'warp'"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT, ids=[" ".join(case[0]) for case in BAD_INPUT])
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, data: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    arguments = [str(tmp_path / "empty") if part == "EMPTY" else part for part in arguments]
    given = [] if "--data" in arguments or arguments == ["nosuch"] or "--resume" in arguments else ["--data", str(data)]
    out = [] if arguments == ["nosuch"] else ["--out", str(tmp_path / "runs")]
    assert run([*arguments, *given, *out]) == 2
    refused(capsys, *words)
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    """One line on stderr that holds `words`."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("daypack: error: ")
    for word in words:
        assert word in lines[0]


def test_a_bad_resume_changes_nothing(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "runs", tmp_path / "runs" / "adamw"
    start = ["train", "--optimizer", "adamw", *SMALL, "--data", str(data), "--out", str(out)]
    assert run(start) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    for arguments, words in [
        (start, ["holds a training run", f"--resume {folder}"]),
        (["train", "--resume", str(folder), "--model", "small"], ["--model small", "--model tiny", "--name"]),
        (["train", "--resume", str(folder), "--steps", "9"], ["--steps 9", "--steps 8"]),
        (["train", "--resume", str(folder), "--optimizer", "gefen"], ["--optimizer gefen"]),
        (["train", "--resume", str(folder), "--name", "x"], [f"--name x has no meaning with --resume {folder}"]),
        (["train", "--resume", str(folder), "--out", "x"], ["--out x has no meaning", "leave --out out"]),
        (["train", "--resume", str(folder), "--data", str(folder)], ["other data"]),
        (["compare", "--out", str(out), "--name", "adamw"], ["not written by daypack compare", "--name"]),
    ]:
        assert run(arguments) == 2
        refused(capsys, *words)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    saved = folder / "checkpoint.pt"
    for content in (before["checkpoint.pt"][:-1000], b"", b"not a checkpoint"):
        saved.write_bytes(content)
        assert run(["train", "--resume", str(folder)]) == 2
        refused(capsys, str(saved), "resume from another checkpoint")
        assert saved.read_bytes() == content
    assert (folder / "metrics.jsonl").read_bytes() == before["metrics.jsonl"]


def test_an_output_folder_that_cannot_be_is_one_line(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("compare", "train"):
        assert run([command, *SMALL, "--data", str(data), "--out", str(data)]) == 2
        refused(capsys, "text.txt")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"daypack {daypack.__version__}\n"
    assert run([]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(shown.out.splitlines()) > 12
    assert "Usage: daypack" in shown.out
    for command, words in (("compare", "adamw=2e-3"), ("train", "--resume runs/gefen")):
        assert run([command, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert words in shown
        assert "Example: daypack" in shown


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def test_without_the_extra_one_line_says_what_to_install() -> None:
    done = python(
        "import sys; sys.modules['typer'] = None; sys.argv = ['daypack']; import daypack.cli; daypack.cli.main()"
    )
    assert done.returncode == 2
    assert done.stderr == "daypack: error: the command line needs typer; pip install 'daypack[cli]'\n"


def test_importing_the_library_imports_nothing_of_the_command_line() -> None:
    done = python(
        "import daypack, sys; print({'typer', 'rich', 'matplotlib', 'jinja2', 'daypack.lab'} & set(sys.modules))"
    )
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("job", ["train", "compare"])
def test_a_reader_that_leaves_does_not_end_the_job(job: str, merged: bool, tmp_path: Path, data: Path) -> None:
    """`daypack train | head -1` trains to the end, and `daypack train 2>&1 | head -1` too."""
    arguments = [job, *SMALL, "--data", str(data), "--out", str(tmp_path / "runs"), "--name", "x"]
    reader, writer = Pipe(duplex=False)
    errors = tmp_path / "errors"
    process = start(COMMAND, *arguments, cwd=ROOT, stdout=writer, stderr=writer if merged else errors)
    writer.close()
    with reader, open(reader.fileno(), closefd=False) as stream:
        assert stream.readline()
    late = join([process], 60)
    complaint = "" if merged else errors.read_text()
    assert (late, process.exitcode) == ([], 0), complaint
    assert without_progress(complaint) == []
    assert records(tmp_path / "runs" / "x")[-1]["step"] == 8
    assert (tmp_path / "runs" / "x" / "report.html").exists()
