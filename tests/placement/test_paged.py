"""State that lives elsewhere: the same numbers, nothing left behind, and little of it in memory at a time."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack
from daypack.formats.base import State
from daypack.placement import mapped, schedule
from daypack.placement.base import Placement, is_mapped
from daypack.placement.staged import Staged

from ..conformance.scene import SHAPES, assert_same, clone, parameters, state_of, through_file, train, values

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "gefen": {},
    "gefen blocks": {"second_moment": "blocks"},
    "adafactor": {"beta1": 0.9},
    "lamb": {"bits": 8},
    "galore": {"rank": 4, "update_proj_gap": 2},
}
every = pytest.mark.parametrize("which", OPTIMIZERS)
LARGE = ("matrix", "conv", "experts", "prime", "embedding")


def create(which: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    return daypack.create(which.split()[0], params, **{**OPTIMIZERS[which], **options})


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parameters on the CPU treated as if they were on an accelerator: each working copy is another tensor."""

    def make(kind: str, spill_dir: str | None, device: torch.device) -> Placement:
        return Staged(device) if kind == "paged" else schedule.Resident(device)

    with monkeypatch.context() as patch:
        patch.setattr(schedule, "_make", make)
        yield


def trained(which: str, steps: int = 5, **options: Any) -> tuple[Any, Any]:
    params = parameters()
    optimizer = create(which, params.items(), **options)
    train(optimizer, params, range(steps))
    return optimizer, params


@every
def test_paged_training_is_the_resident_one(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PIECE_BYTES", 20_000)  # several pieces, and parameters larger than one
    reference, others = trained(which)
    optimizer, params = trained(which, placement="paged", spill_dir=str(tmp_path))
    assert_same(values(params), values(others))
    assert_same(state_of(optimizer, params), state_of(reference, others))
    assert list(tmp_path.iterdir()) == []  # The files have no names: nothing is left behind.
    for p in params.values():
        for value in optimizer.state[p].values():
            assert type(value) is Tensor
            assert is_mapped(value) == (value.nbytes >= mapped.SMALLEST)


@every
@pytest.mark.usefixtures("staged")
def test_staged_training_is_the_resident_one(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PIECE_BYTES", 20_000)
    reference, others = trained(which, fused=False)
    optimizer, params = trained(which, fused=False, placement="paged")
    assert_same(values(params), values(others))
    assert_same(state_of(optimizer, params), state_of(reference, others))


@every
def test_checkpoints_are_ordinary_and_residency_is_the_live_optimizers(which: str, tmp_path: Path) -> None:
    """Paged to resident and back, bit for bit; options of the file do not say where the state is put."""
    paged = {"placement": "paged", "spill_dir": str(tmp_path)}
    whole, whole_params = trained(which, 6)
    for source, target in (({}, paged), (paged, {}), (paged, paged)):
        first, params = trained(which, 3, **source)
        file = through_file(first.state_dict())
        mine = clone(params)
        second = create(which, mine.items(), **target)
        second.load_state_dict(file)
        assert second.param_groups[0]["placement"] == target.get("placement", "resident")
        for name in LARGE:
            large = [v for v in second.state[mine[name]].values() if v.nbytes >= mapped.SMALLEST]
            assert all(is_mapped(value) == bool(target) for value in large)
        train(second, mine, range(3, 6))
        assert_same(values(mine), values(whole_params))
        assert_same(state_of(second, mine), state_of(whole, whole_params))


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_have_files_of_their_own(copied: str, tmp_path: Path) -> None:
    optimizer, params = trained("gefen", 3, placement="paged", spill_dir=str(tmp_path))
    pair = (optimizer, list(params.values()))
    other, others = copy.deepcopy(pair) if copied == "deepcopy" else pickle.loads(pickle.dumps(pair))
    twins = dict(zip(SHAPES, others, strict=True))
    assert is_mapped(other.state[twins["matrix"]]["exp_avg_codes"])
    before = state_of(optimizer, params)
    train(other, twins, range(3, 5))
    assert_same(state_of(optimizer, params), before)
    train(optimizer, params, range(3, 5))
    assert_same(values(twins), values(params))


def test_moving_state_is_a_group_option() -> None:
    """Set on the live group, it holds from the next step on; the numbers do not care."""
    optimizer, params = trained("lamb", 2)
    reference, others = trained("lamb", 2)
    for placement in ("paged", "resident"):
        optimizer.param_groups[0]["placement"] = placement
        train(optimizer, params, [7])
        train(reference, others, [7])
        assert is_mapped(optimizer.state[params["matrix"]]["exp_avg_sq"]) == (placement == "paged")
    assert_same(values(params), values(others))
    assert_same(state_of(optimizer, params), state_of(reference, others))


def test_a_failing_step_leaves_the_states_in_their_places(monkeypatch: pytest.MonkeyPatch, staged: None) -> None:
    optimizer, params = trained("gefen", 2, fused=False, placement="paged")
    homes = {name: optimizer.state[p] for name, p in params.items()}
    monkeypatch.setattr("daypack.kernels.reference.apply", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(optimizer, params, [2])
    assert all(item.state is homes[item.name] for item in optimizer._work.items)


class Recorder(Placement):
    """Writes down what is asked of it, as an accelerator's queue would see it."""

    def __init__(self, log: list[str], names: dict[int, str]) -> None:
        self.log, self.names = log, names

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def holds(self, tensor: Tensor) -> bool:
        return True

    def fetch(self, state: State) -> State:
        self.log.append(f"fetch {self.names[id(state)]}")
        return state

    def ready(self, working: State) -> State:
        self.log.append(f"ready {self.names[id(working)]}")
        return working

    def release(self, state: State, working: State) -> None:
        self.log.append(f"release {self.names[id(state)]}")

    def wait(self) -> None:
        self.log.append("wait")


def test_the_next_piece_is_on_its_way_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    names: dict[int, str] = {}
    monkeypatch.setattr(schedule, "_make", lambda *_: Recorder(log, names))
    monkeypatch.setattr(schedule, "PIECE_BYTES", 1)
    params = {name: Parameter(torch.ones(64)) for name in "abc"}
    optimizer = daypack.LAMB(params.items(), placement="paged")
    daypack.materialize_state(optimizer)
    names.update({id(optimizer.state[p]): name for name, p in params.items()})
    train(optimizer, params, [0])
    order = "fetch a,fetch b,ready a,release a,fetch c,ready b,release b,ready c,release c"
    assert ",".join(log) == order
    for read in (optimizer.state_dict, lambda: pickle.dumps(optimizer), lambda: copy.deepcopy(optimizer)):
        log.clear()
        names.setdefault(0, "")
        read()
        assert log[0] == "wait"  # Nothing is read while a copy of it is still on its way.


def test_what_cannot_be_paged_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    params = {"w": Parameter(torch.ones(64, 512))}
    nowhere, file = str(tmp_path / "nowhere"), tmp_path / "file"
    file.touch()
    for path in (nowhere, str(file)):
        with pytest.raises(ValueError, match=r"no directory that can be written to: .*create it first"):
            daypack.LAMB(params.items(), placement="paged", spill_dir=path)
    file.unlink()
    with pytest.raises(ValueError, match=r"spill_dir='.*' is for placement='paged'; set that, or leave it out"):
        daypack.LAMB(params.items(), spill_dir=str(tmp_path))
    groups = [{"params": [params["w"]], "placement": "paged"}]
    assert daypack.LAMB(groups, spill_dir=str(tmp_path)).param_groups[0]["spill_dir"] == str(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        full = daypack.LAMB(params.items(), placement="paged", spill_dir=str(tmp_path))
        with pytest.raises(ValueError, match="No space left"):
            train(full, params, [0])
        assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(mapped, "os", types.SimpleNamespace(name="nt"))
        with pytest.raises(ValueError, match="POSIX"):
            train(daypack.LAMB(params.items(), placement="paged"), params, [0])
    with pytest.raises(ValueError, match="meta"):
        schedule.Placements().of({"placement": "paged", "spill_dir": None}, torch.device("meta"))
    for wrong in ({"placement": "disk"}, {"placement": None}, {"spill_dir": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            daypack.Gefen(params.values(), **wrong)  # type: ignore[arg-type]


RESIDENT = """
import sys, torch, daypack
torch.set_num_threads(1)
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10
params = [torch.nn.Parameter(torch.zeros(1024, 2048)) for _ in range(16)]
grad = torch.randn(1024, 2048)
for p in params:
    p.grad = grad
optimizer = daypack.LAMB(params, placement="paged", spill_dir=sys.argv[1], fused=False)
before = peak()
optimizer.step()
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the process's resident size from /proc")
def test_most_of_the_state_is_outside_of_memory(tmp_path: Path) -> None:
    """256 MiB of it: one piece of 64 MiB, the next one, and a step's chunks are in memory."""
    command = [sys.executable, "-c", RESIDENT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 190 << 20


def test_pieces_cover_what_is_admitted_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PIECE_BYTES", 100)
    sizes = [40, 40, 40, 300, 10, 0, 100]
    updates: Any = [types.SimpleNamespace(state={"m": torch.zeros(size, dtype=torch.uint8)}) for size in sizes]
    assert schedule._pieces(updates, np.ones(7, bool)) == [[0, 1], [2], [3], [4, 5], [6]]
    assert schedule._pieces(updates, np.array([0, 1, 0, 0, 1, 0, 0], bool)) == [[1, 4]]
    assert schedule._pieces(updates, np.zeros(7, bool)) == []
