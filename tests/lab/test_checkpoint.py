from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from daypack.lab import Job, TextTask, checkpoint
from daypack.lab.checkpoint import load_checkpoint, resume, save_checkpoint
from daypack.lab.corpus import split_corpus
from tests.lab.texts import config, task, text
from tests.processes import python


def trained(steps: int, **changes: Any) -> Job:
    job = Job(config(**changes), task())
    for _ in range(steps):
        job.advance()
    return job


def tensors(job: Job) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, by name."""
    found = dict(job.model.state_dict())
    for parameter, state in job.optimizer.state_dict()["state"].items():
        found.update({f"{parameter}.{key}": value for key, value in state.items() if torch.is_tensor(value)})
    return found


def assert_equal(one: Job, other: Job) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "gefen", "sgd"])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, optimizer: str, dtype: str, at: int) -> None:
    straight = trained(at, optimizer=optimizer, dtype=dtype)
    save_checkpoint(tmp_path / "c.pt", straight)
    resumed = resume(load_checkpoint(tmp_path / "c.pt"), task=task())
    assert resumed.step == at
    assert_equal(straight, resumed)
    rest = [(r.step, r.loss, r.lr, r.grad_norm, r.validation) for r in straight.train()]
    assert rest == [(r.step, r.loss, r.lr, r.grad_norm, r.validation) for r in resumed.train()]
    assert_equal(straight, resumed)


def test_time_and_random_state_go_on(tmp_path: Path) -> None:
    job = trained(2, optimizer="adamw")
    before = torch.get_rng_state()
    save_checkpoint(tmp_path / "c.pt", job)
    try:
        torch.rand(3)
        resumed = resume(load_checkpoint(tmp_path / "c.pt"), task=task())
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_rng_state(before)
    assert resumed.seconds == job.seconds > 0


def test_without_optimizer_state_the_moments_restart_and_a_warning_says_so(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", trained(4, optimizer="adamw"))
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    del content["optimizer"]
    torch.save(content, tmp_path / "c.pt")
    with pytest.warns(UserWarning, match=r"c.pt holds no optimizer state: the moments restart from zero at step 4"):
        job = resume(load_checkpoint(tmp_path / "c.pt"), task=task())
    assert job.step == 4
    assert not job.optimizer.state
    assert job.advance().step == 5


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused(tmp_path: Path, fraction: float) -> None:
    save_checkpoint(tmp_path / "c.pt", trained(1, optimizer="adamw"))
    content = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(content[: int(len(content) * fraction)])
    with pytest.raises(ValueError, match=r"truncated checkpoint .*c.pt: .*without --resume"):
        load_checkpoint(tmp_path / "c.pt")


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_a_flipped_bit_is_refused(tmp_path: Path, fraction: float) -> None:
    save_checkpoint(tmp_path / "c.pt", trained(1, optimizer="adamw"))
    content = bytearray((tmp_path / "c.pt").read_bytes())
    content[int(len(content) * fraction)] ^= 16
    (tmp_path / "c.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged or truncated checkpoint .*c.pt"):
        load_checkpoint(tmp_path / "c.pt")


class Strange:
    """Something that only an unsafe load would build."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weight": torch.zeros(2)}, r"c.pt is not a checkpoint of daypack train"),
        ([1, 2], r"c.pt is not a checkpoint of daypack train"),
        (Strange(), r"damaged or truncated checkpoint .*c.pt"),
        ({"format": checkpoint.TRAINING_FORMAT, "version": 99}, r"c.pt has version 99, this daypack reads 1"),
        ({"format": checkpoint.TRAINING_FORMAT, "version": 1, "config": {}}, r"c.pt: no valid entry 'corpus'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "c.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 99}, "step 99 of 12"),
        ({"config": {"steps": "many"}}, "damaged checkpoint"),
        ({"config": {"speed": 1}}, "unknown training options"),
        (
            {"model": {}},
            r"does not fit model 'tiny': embedding.weight should be \[256, 64\] torch.float32, the file has not",
        ),
        ({"optimizer": {"state": {}, "param_groups": []}}, r"optimizer state of .*c.pt does not fit"),
        ({"optimizer": [1]}, r"optimizer state of .*c.pt does not fit"),
        ({"random": {"cpu": torch.zeros(3)}}, "random state"),
        ({"corpus": "0123456789abcdef"}, r"was trained on other data than a test; give the same text with --data"),
    ],
)
def test_content_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_checkpoint(tmp_path / "c.pt", trained(1, optimizer="adamw"))
    torch.save({**torch.load(tmp_path / "c.pt", weights_only=True), **change}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=message):
        resume(load_checkpoint(tmp_path / "c.pt"), task=task())


def test_another_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", trained(1, optimizer="adamw"))
    with pytest.raises(ValueError, match=r"c.pt does not fit model 'small': embedding.weight should be \[256, 128\]"):
        resume(load_checkpoint(tmp_path / "c.pt"), config(optimizer="adamw", model="small"), task())
    with pytest.raises(ValueError, match=r"c.pt does not fit model 'tiny'.*bfloat16"):
        resume(load_checkpoint(tmp_path / "c.pt"), config(optimizer="adamw", dtype="bfloat16"), task())


def test_missing_files_and_other_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint at .*c.pt"):
        load_checkpoint(tmp_path / "c.pt")
    save_checkpoint(tmp_path / "c.pt", trained(1, optimizer="adamw"))
    with pytest.raises(ValueError, match="other data"):
        resume(load_checkpoint(tmp_path / "c.pt"), task=TextTask(split_corpus(text()[:-1], "a shorter test")))


def test_a_failed_save_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = trained(1, optimizer="adamw")
    save_checkpoint(tmp_path / "c.pt", job)
    job.advance()

    def fail(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "c.pt", job)
    assert load_checkpoint(tmp_path / "c.pt").step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from daypack.lab.checkpoint import save_checkpoint
from tests.lab.test_checkpoint import trained
path, save = Path(sys.argv[1]), torch.save
job = trained(1, optimizer="adamw")
save_checkpoint(path, job)
job.advance()
def die(content, temporary):
    save(content, temporary)
    os.truncate(temporary, os.path.getsize(temporary) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = die
save_checkpoint(path, job)
"""


def test_a_kill_in_the_middle_of_saving_loses_nothing(tmp_path: Path) -> None:
    process = python(KILLED, str(tmp_path / "c.pt"))
    assert process.returncode == -signal.SIGKILL
    job = resume(load_checkpoint(tmp_path / "c.pt"), task=task())
    assert job.step == 1
    job.advance()
    save_checkpoint(tmp_path / "c.pt", job)  # reuses the name that the kill left behind
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    assert_equal(job, trained(2, optimizer="adamw"))
