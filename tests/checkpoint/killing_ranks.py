"""Kills two ranks during writes of their shards: ``python -m tests.checkpoint.killing_ranks FOLDER``.

The ranks resume, step and save for ever. Each time, the parent waits for a write to begin, lets a random part of it
pass, sends SIGKILL to one and then to the other, and compares what is on the disk with a run in one process.
Prints the number of kills, of those within a write, and of the steps that were saved.
"""

from __future__ import annotations

import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import daypack
from daypack.checkpoint import file as files
from daypack.checkpoint import load_file, save_file

from ..conformance.scene import assert_same, parameters, train
from ..distributed.scene import mesh, set_gradients, sharded
from ..processes import fresh

SHAPES = {f"layer.{i}": (512, 1280) for i in range(3)} | {"bias": (300,)}
KILLS, WORLD = 4, 2


def make(shard: bool) -> tuple[Any, dict[str, Any]]:
    params = parameters(shapes=SHAPES)
    params = sharded(params, mesh()) if shard else params
    # Its moments need nothing from other ranks: equal to the bit on any number of them.
    return daypack.AdamW8bit(params.items(), lr=1e-3), params


def rank(index: int, path: Path, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=index, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    optimizer, params = make(True)
    step = int(load_file(optimizer, path)["step"])
    while True:
        set_gradients(params, step)
        optimizer.step()
        step += 1
        save_file(optimizer, path, {"step": str(step)})


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    path = folder / "state.safetensors"
    reference, params = make(False)
    save_file(reference, path, {"step": "0"})  # the first set of shards replaces a whole file
    taken, chance, partial = 0, random.Random(0), 0
    for kill in range(KILLS):
        ranks = [fresh().Process(target=rank, args=(i, path, str(folder / f"store{kill}"))) for i in range(WORLD)]
        for process in ranks:
            process.start()
        try:
            deadline = time.monotonic() + 60
            before, skip = path.stat().st_ino, chance.randrange(3)
            temporaries = lambda: files._beside(path, ".", ".tmp")  # noqa: E731
            while time.monotonic() < deadline and (skip or not temporaries()):
                now = path.stat().st_ino
                skip, before = max(0, skip - (now != before)), now
                time.sleep(0.0005)  # a write takes far longer; looking all the time takes the ranks' cores
            time.sleep(0.02 * chance.random())
            assert all(process.is_alive() for process in ranks), "a rank ended by itself"
        finally:
            for process in chance.sample(ranks, WORLD):
                process.kill()
                process.join()
        partial += bool(temporaries()) or len(files.shards_of(path)) != len(files.members(path))
        optimizer, _ = make(False)
        step = int(load_file(optimizer, path)["step"])
        assert step >= taken, (step, taken)
        train(reference, params, range(taken, step))
        taken = step
        theirs, ours = (dict(enumerate(o.state_dict()["state"].values())) for o in (optimizer, reference))
        assert_same({key: dict(value) for key, value in theirs.items()}, {key: dict(v) for key, v in ours.items() if v})
    print(KILLS, partial, taken)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
