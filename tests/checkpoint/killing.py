"""Kills a process during twenty checkpoint writes: ``python -m tests.checkpoint.killing FOLDER``.

A forked child resumes, steps and saves for ever. Each time, the parent waits for a write to begin, lets a random part
of it pass, sends SIGKILL, and compares what is on the disk with an uninterrupted run.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import daypack
from daypack.checkpoint import load_file, save_file

from ..conformance.scene import assert_same, parameters, train

SHAPES = {f"layer.{i}": (512, 640) for i in range(4)} | {"bias": (300,)}
KILLS = 20


def make() -> tuple[Any, dict[str, Any]]:
    params = parameters(shapes=SHAPES)
    return daypack.Gefen(params.items()), params


def child(path: Path) -> None:
    optimizer, params = make()
    step = int(load_file(optimizer, path)["step"])
    while True:
        train(optimizer, params, [step])
        step += 1
        save_file(optimizer, path, {"step": str(step)})


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    path, temporary = folder / "state.safetensors", folder / ".state.safetensors.tmp"
    reference, params = make()
    save_file(reference, path, {"step": "0"})
    taken, chance, partial, steps = 0, random.Random(0), 0, []
    for _ in range(KILLS):
        pid = os.fork()
        if pid == 0:
            try:
                child(path)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 60
        skip = chance.randrange(2)  # writes that are left alone
        before = path.stat().st_ino
        while time.monotonic() < deadline and (skip or not temporary.exists()):
            if path.stat().st_ino != before:
                before, skip = path.stat().st_ino, max(0, skip - 1)
        time.sleep(0.004 * chance.random())
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        partial += temporary.exists()
        optimizer, _ = make()
        step = int(load_file(optimizer, path)["step"])
        assert step >= taken, (step, taken)
        train(reference, params, range(taken, step))
        taken = step
        steps.append(step)
        theirs = [dict(state) for state in copy.deepcopy(optimizer.state_dict()["state"]).values()]
        ours = [dict(state) for state in reference.state_dict()["state"].values()]
        assert_same(theirs, ours)
    print(len(steps), partial, steps[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
