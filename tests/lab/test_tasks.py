from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import daypack
from daypack.lab import TASKS, Job, TrainConfig, load_task, run
from daypack.lab.checkpoint import load_checkpoint, resume, save_checkpoint
from daypack.lab.graph import GraphTask
from tests.lab.texts import task as text_task

OTHERS = ("images", "graph")


def config(task: str, **changes: Any) -> TrainConfig:
    small: dict[str, Any] = {"model": "tiny", "steps": 8, "eval_every": 4, "warmup": 2, "threads": 1, "task": task}
    return TrainConfig(**{**small, **changes})


@pytest.mark.parametrize("task", OTHERS)
def test_it_learns(task: str) -> None:
    result = run(config(task, steps=80, lr=8e-3, optimizer="adamw"))
    assert result.records[0].loss > 0.5
    assert result.accuracy > 0.85
    assert result.summary()["accuracy"] == result.accuracy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("task", OTHERS)
def test_a_seed_decides_weights_and_batches_and_nothing_else_does(task: str, dtype: str) -> None:
    before = torch.get_rng_state()
    losses = [[r.loss for r in run(config(task, dtype=dtype, seed=seed)).records] for seed in (3, 3, 4)]
    assert torch.equal(before, torch.get_rng_state())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("optimizer", daypack.names())
@pytest.mark.parametrize("task", OTHERS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, task: str, optimizer: str) -> None:
    straight = Job(config(task, optimizer=optimizer))
    for _ in range(3):
        straight.advance()
    save_checkpoint(tmp_path / "c.pt", straight)
    resumed = resume(load_checkpoint(tmp_path / "c.pt"))
    rest = [[(r.step, r.loss, r.validation, r.accuracy) for r in job.train()] for job in (straight, resumed)]
    assert rest[0] == rest[1]
    assert all(map(torch.equal, straight.model.parameters(), resumed.model.parameters()))


@pytest.mark.parametrize("task", OTHERS)
def test_nothing_that_is_held_out_is_trained_on(task: str) -> None:
    settings = config(task, batch=2000)
    data = load_task(settings)
    seen = {tuple(row) for step in range(3) for row in data.batch(settings, step).tolist()}
    held_out = [tuple(row) for batch in data.held_out(settings) for row in batch.tolist()]
    assert len(held_out) == {"images": 359, "graph": 26}[task]
    assert not seen & set(held_out)
    assert torch.equal(next(iter(data.held_out(settings))), next(iter(data.held_out(settings))))


def test_a_graph_convolution_averages_over_neighbours() -> None:
    data = GraphTask.load(config("graph"))
    degrees = (data.adjacency > 0).sum(1)
    assert torch.allclose(data.adjacency, data.adjacency.T)
    assert degrees.sum() == 2 * 78 + 34  # edges both ways, and a loop at each node
    assert torch.linalg.eigvalsh(data.adjacency.double()).max() == pytest.approx(1.0, abs=1e-6)
    labelled = data.batch(config("graph"), 0)
    assert sorted(labelled[:, 1].tolist()) == [0] * 4 + [1] * 4


@pytest.mark.parametrize(("task", "package"), [("images", "sklearn"), ("graph", "networkx")])
def test_a_missing_package_is_named(task: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"task '{task}' needs {package}.*; pip install 'daypack\[tasks\]'"):
        load_task(config(task))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sound"}, "unknown task 'sound'; choose one of text, images, graph"),
        (
            {"task": "graph", "model": "large"},
            r"unknown model 'large'; choose one of tiny, small, medium \(task 'graph'\)",
        ),
        ({"task": "images", "data": "x"}, "task 'images' has its own, so leave --data out"),
        ({"task": "graph", "parallel": "ddp"}, "parallel 'ddp' is for the text task"),
    ],
)
def test_what_does_not_fit_a_task_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_configs_from_before_there_were_tasks_are_text() -> None:
    values = TrainConfig().to_dict()
    del values["task"]
    assert TrainConfig.from_dict(values) == TrainConfig()


@pytest.mark.parametrize("task", TASKS)
def test_data_is_known_again_by_its_fingerprint(tmp_path: Path, task: str) -> None:
    job = Job(config(task), text_task() if task == "text" else None)
    assert len(job.task.fingerprint) == 16
    save_checkpoint(tmp_path / "c.pt", job)
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    torch.save({**content, "corpus": "0123456789abcdef"}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="was trained on other data than"):
        resume(load_checkpoint(tmp_path / "c.pt"), task=job.task)
