"""Runs that torchrun started, against the same runs in one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from daypack.lab import parallel
from tests.processes import python

COMMON = ["--model", "tiny", "--batch", "4", "--context", "32", "--threads", "1", "--eval-every", "2"]


def train(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One process, or ranks with the variables that torchrun sets."""
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    code = "import daypack.cli; daypack.cli.main()"
    return python(code, "train", *arguments, cwd=folder, together=each if ranks > 1 else [{}])


def torchrun(folder: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same, but that ranks are started by torchrun itself."""
    if ranks == 1:
        return train(folder, ranks, *arguments)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-endpoint", "localhost:0"]
    start += ["--rdzv-backend", "c10d"]
    command = [sys.executable, *start, "-m", "daypack", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    ("kind", "optimizer", "start"), [("fsdp2", "gefen", torchrun), ("fsdp2", "adamw", train), ("ddp", "gefen", train)]
)
def test_ranks_train_as_one_process_and_go_on_as_one(
    kind: str, optimizer: str, start: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Same losses; and what ranks saved, one process goes on with, and the other way round."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
    common = [*COMMON, "--data", str(tmp_path / "text.txt"), "--optimizer", optimizer, "--checkpoint-every", "4"]
    for name, ranks, extra in (("one", 1, []), ("two", 2, ["--parallel", kind])):
        done = start(tmp_path, ranks, *common, *extra, "--steps", "8", "--name", name)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("report:") == 1, "every rank printed"
    one, two = (tmp_path / "runs" / name for name in ("one", "two"))
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)
    files = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, two)]
    for ours, theirs in zip(*(file["optimizer"]["state"].values() for file in files), strict=True):
        for key, value in ours.items():
            assert value.shape == theirs[key].shape, key
            assert value.dtype == theirs[key].dtype, key
    # Longer, from where the other kind of run stood.
    for folder, ranks, extra in ((two, 1, []), (one, 2, ["--parallel", kind])):
        content = torch.load(folder / "checkpoint.pt", weights_only=True)
        content["config"]["steps"] = 10
        torch.save(content, folder / "checkpoint.pt")
        done = start(tmp_path, ranks, "--resume", str(folder), *extra)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("going on after step 8 of 10") == 1, "every rank printed"
    assert losses(two)[8:] == pytest.approx(losses(one)[8:], abs=2e-3)
    assert len(losses(two)) == 10


def test_errors_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"), parallel.processes("ddp", "cpu"):
        pass
    with pytest.raises(ValueError, match="none, ddp, fsdp2"), parallel.processes("zero", "cpu"):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--parallel ddp"), parallel.processes("none", "cpu"):
        pass
    with pytest.raises(ValueError, match="--batch 5 does not divide by 2"):
        parallel.Ranks("ddp", 0, 2).part(torch.zeros(5, 3))
