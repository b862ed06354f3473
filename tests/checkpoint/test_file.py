"""Files of optimizer state: exact round trips, their size, what a reader without daypack finds in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file as plain_load

import daypack
from daypack.checkpoint import load_file, save_file

from ..conformance.scene import (
    FLOATS,
    assert_same,
    clone,
    parameters,
    snapshot,
    state_bytes,
    state_of,
    train,
    values,
)
from ..conformance.specs import CASES, Case

every = pytest.mark.parametrize("case", CASES, ids=str)


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(str(path), framework="pt") as file:
        return json.loads(file.metadata()["daypack"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every
def test_round_trip_continues_bit_for_bit(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    params = parameters(dtype)
    optimizer = case.create(params.items())
    train(optimizer, params, range(3), without=("prime",))
    save_file(optimizer, tmp_path / "state.safetensors", {"note": "späti"})
    mine = clone(params)
    other = case.create(mine.items(), lr=0.3)
    assert load_file(other, tmp_path / "state.safetensors") == {"note": "späti"}
    assert_same(state_of(other, mine), state_of(optimizer, params))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for key, value in optimizer.param_groups[0].items():
        if key != "params":
            assert_same(other.param_groups[0][key], value, key)
    train(optimizer, params, range(3, 5))
    train(other, mine, range(3, 5))
    assert_same(values(mine), values(params))
    assert_same(state_of(other, mine), state_of(optimizer, params))


@every
def test_unnamed_groups_before_and_after_the_first_step(case: Case, tmp_path: Path) -> None:
    for steps in (0, 2):
        params = parameters()
        listed = list(params.values())
        groups = [{"params": listed[:3], "lr": torch.tensor(0.125)}, {"params": listed[3:], "weight_decay": 0.0}]
        optimizer = case.create(groups, foreach=False)
        train(optimizer, params, range(steps))
        path = tmp_path / f"{steps}.safetensors"
        save_file(optimizer, path)
        assert header_of(path)["groups"][1]["params"][0] == "1.0"
        mine = clone(params)
        listed = list(mine.values())
        other = case.create([{"params": listed[:3]}, {"params": listed[3:]}], foreach=False)
        load_file(other, path)
        assert_same(state_of(other, mine), state_of(optimizer, params))
        assert_same(other.param_groups[0]["lr"], torch.tensor(0.125))
        assert other.param_groups[1]["weight_decay"] == 0.0
        train(optimizer, params, range(steps, 4))
        train(other, mine, range(steps, 4))
        assert_same(values(mine), values(params))


@every
def test_names_decide_in_another_order(case: Case, tmp_path: Path) -> None:
    params = parameters()
    optimizer = case.create(params.items())
    train(optimizer, params, range(2))
    save_file(optimizer, tmp_path / "state.safetensors")
    mine = dict(reversed(clone(params).items()))
    other = case.create([(f"module.{name}", p) for name, p in mine.items()])
    load_file(other, tmp_path / "state.safetensors")
    assert_same(dict(sorted(state_of(other, mine).items())), dict(sorted(state_of(optimizer, params).items())))


def test_reads_without_daypack_and_is_no_larger_than_the_state(tmp_path: Path) -> None:
    shapes = {f"layer.{i}.weight": (512, 512) for i in range(6)} | {f"layer.{i}.bias": (512,) for i in range(6)}
    for name in ("gefen", "adamw"):
        params = parameters(shapes=shapes)
        optimizer = daypack.create(name, params.items())
        train(optimizer, params, range(2))
        path = tmp_path / f"{name}.safetensors"
        save_file(optimizer, path)
        tensors = plain_load(path)
        for parameter, p in params.items():
            for key, value in optimizer.state[p].items():
                if value.dim() and not key.endswith("_codebook"):
                    assert_same(tensors[f"{parameter}.{key}"], value)
        books = [key for key in tensors if key.endswith("_codebook")]
        assert len(books) == (name == "gefen")
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size - header_bytes <= state_bytes(optimizer)
        assert path.stat().st_size <= 1.05 * state_bytes(optimizer)
        assert not list(tmp_path.glob(".*"))


def test_state_of_another_class_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for case in CASES:
        params = parameters()
        optimizer = case.create(params.items())
        train(optimizer, params, range(2))
        path = tmp_path / f"{case}.safetensors"
        save_file(optimizer, path)
        for other in CASES:
            if other.spec.name == case.spec.name:
                continue
            mine = clone(params)
            target = other.create(mine.items())
            before = snapshot(target, mine)
            with pytest.raises(ValueError, match=r"daypack\.convert"):
                load_file(target, path)
            assert_same(snapshot(target, mine), before)


def test_other_parameters_are_refused_whole(tmp_path: Path) -> None:
    for name in ("adamw", "sgd", "gefen"):
        options = {"momentum": 0.9} if name == "sgd" else {}
        params = parameters(shapes={"a": (24, 64), "b": (40,)})
        optimizer = daypack.create(name, params.items(), **options)
        train(optimizer, params, range(2))
        path = tmp_path / "state.safetensors"
        save_file(optimizer, path)
        for shapes, named in (({"a": (24, 64), "b": (41,)}, "b"), ({"a": (24, 64), "c": (40,)}, "c")):
            mine = parameters(shapes=shapes)
            other = daypack.create(name, mine.items(), **options)
            train(other, mine, range(1))
            before = snapshot(other, mine)
            with pytest.raises(ValueError, match=named):
                load_file(other, path)
            assert_same(snapshot(other, mine), before)


def test_missing_files_and_unsavable_state_are_one_line() -> None:
    params = parameters(shapes={"a": (3, 4)})
    optimizer = daypack.create("gefen", params.items())
    with pytest.raises(ValueError, match="no checkpoint at"):
        load_file(optimizer, "nowhere/at-all.safetensors")
    optimizer.state[params["a"]]["name"] = "a string"
    optimizer.state[params["a"]]["step"] = torch.tensor(0.0)
    with pytest.raises(ValueError, match="name of parameter a is a str"):
        save_file(optimizer, "nothing.safetensors")
    assert not Path("nothing.safetensors").exists()


_PEAK = """
import sys, torch, threading, time
import daypack
from daypack.checkpoint import load_file, save_file
path, do = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
shapes = [(1024, 1024)] * 24
params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
def anonymous():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))
for name in ("gefen", "adamw"):
    optimizer = daypack.create(name, params)
    if do == "save":
        for p in params:
            p.grad = torch.randn(p.shape) * 1e-2
        optimizer.step()
        save_file(optimizer, f"{path}/{name}.safetensors")
        if name == "gefen":
            daypack.checkpoint.split(f"{path}/{name}.safetensors", 3, f"{path}/parts")
        continue
    for place in (path, f"{path}/parts")[: 2 if name == "gefen" else 1]:
        optimizer = daypack.create(name, params)
        load_file(daypack.create(name, [torch.nn.Parameter(torch.zeros(8, 8))]), sys.argv[3] + f"/{name}.safetensors")
        before, peak, done = anonymous(), 0, False
        def watch():
            global peak
            while not done:
                peak = max(peak, anonymous())
                time.sleep(0.0005)
        watcher = threading.Thread(target=watch)
        watcher.start()
        load_file(optimizer, f"{place}/{name}.safetensors")
        done = True
        watcher.join()
        held = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
        print(name, place == path, held, max(peak, anonymous()) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_load_takes_the_state_and_one_parameter(tmp_path: Path) -> None:
    """Memory that is the process's own; pages of the file itself are the system's to take back."""
    small = tmp_path / "small"
    small.mkdir()
    for name in ("gefen", "adamw"):
        params = parameters(shapes={"a": (8, 8)})
        optimizer = daypack.create(name, list(params.values()))
        train(optimizer, params, range(1))
        save_file(optimizer, small / f"{name}.safetensors")
    # Else the allocator keeps back, and hands out again, more than is measured.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = os.environ | allocator | {"OMP_NUM_THREADS": "1"}
    for do in ("save", "load"):
        command = [sys.executable, "-c", _PEAK, str(tmp_path), do, str(small)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        _, _, held, peak = line.split()
        one = int(held) / 24
        slack = 6 * 2**20  # the file's header, the allocator's arenas
        assert 0.9 * int(held) <= int(peak) <= int(held) + one + slack, line
