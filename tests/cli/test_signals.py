"""Jobs that are interrupted or terminated."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from daypack.cli import run

from ..processes import join, start
from .test_commands import COMMAND, ROOT, SMALL, checkpoint, records, without_progress
from .test_commands import data as data


def interrupt(arguments: list[str], metrics: Path, pattern: str, number: int) -> tuple[int, str, str]:
    """Start a command, send it a signal once it has written records, and return exit code, stdout and stderr."""
    shown, errors = (metrics.parent / name for name in ("shown", "errors"))
    process = start(COMMAND, *arguments, cwd=ROOT, stdout=shown, stderr=errors)
    try:
        deadline = time.monotonic() + 60
        while process.is_alive() and time.monotonic() < deadline:
            if any(path.stat().st_size for path in metrics.glob(pattern)):
                break
            time.sleep(0.05)
        os.kill(process.pid, number)
    finally:
        late = join([process], 60)
    assert not late, errors.read_text()
    assert "\x1b" not in shown.read_text() + errors.read_text()
    return process.exitcode, shown.read_text(), "\n".join(without_progress(errors.read_text()))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on_from_there(tmp_path: Path, data: Path, number: int, code: int) -> None:
    out = tmp_path / "runs"
    arguments = ["train", "--optimizer", "adamw", *SMALL, "--data", str(data), "--out", str(out), "--steps", "100000"]
    returned, shown, errors = interrupt(arguments, out, "adamw/metrics.jsonl", number)
    assert (returned, errors) == (code, "")
    stopped = checkpoint(out / "adamw")["step"]
    assert 0 < stopped < 100_000
    assert f"stopped and saved after step {stopped}; go on with: daypack train --resume {out / 'adamw'}" in shown
    assert [line["step"] for line in records(out / "adamw")] == list(range(1, stopped + 1))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_comparison_keeps_its_records_and_touches_nothing_else(
    tmp_path: Path, data: Path, number: int, code: int
) -> None:
    out = tmp_path / "runs"
    arguments = ["compare", *SMALL, "--data", str(data), "--out", str(out), "--steps", "100000", "--name", "x"]
    returned, _, errors = interrupt(arguments, out, ".x.*/metrics.jsonl", number)
    (kept,) = out.iterdir()
    assert (returned, errors) == (code, f"daypack: interrupted; what was measured so far is in {kept}")
    assert records(kept)[0]["step"] == 1


def test_a_comparison_that_is_terminated_before_its_first_record_leaves_nothing(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from daypack.lab import Job

    monkeypatch.setattr(Job, "advance", lambda job: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert run(["compare", *SMALL, "--data", str(data), "--out", str(tmp_path / "runs")]) == 143
    assert capsys.readouterr().err == "daypack: interrupted\n"
    assert list((tmp_path / "runs").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before
