"""Killed at any moment of any write, a job goes on from a complete checkpoint, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import daypack

from ..conformance.scene import parameters, train

SHAPES = {f"layer.{i}": (256, 512) for i in range(4)} | {"bias": (300,)}


def _run(module: str, folder: Path, timeout: float) -> list[int]:
    """The numbers that a script printed."""
    result = subprocess.run(
        [sys.executable, "-m", f"tests.checkpoint.{module}", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return list(map(int, result.stdout.split()))


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_twenty_kills(tmp_path: Path) -> None:
    kills, partial, steps = _run("killing", tmp_path, 300)
    assert kills == 20
    assert partial >= 5  # in the middle of a write
    assert steps >= 5  # and writes came to their end as well


def test_two_ranks_killed_while_they_write(tmp_path: Path) -> None:
    kills, partial, steps = _run("killing_ranks", tmp_path, 300)
    assert kills == 4
    assert partial >= 1  # in the middle of a write
    assert steps >= 2


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_ended_at_every_act_of_replacing_whole_files_and_shards(tmp_path: Path) -> None:
    (ended,) = _run("crashing", tmp_path, 120)
    assert ended > 100


@pytest.mark.parametrize("name", ["gefen", "adamw"])
def test_a_failed_write_leaves_the_old_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = daypack.create(name, params.items())
    train(optimizer, params, [0])
    path = tmp_path / "state.safetensors"
    daypack.checkpoint.save_file(optimizer, path)
    before = path.read_bytes()
    train(optimizer, params, [1])

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("daypack.checkpoint.file._write_tensor", full)
    with pytest.raises(ValueError, match="No space left"):
        daypack.checkpoint.save_file(optimizer, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
