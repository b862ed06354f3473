from __future__ import annotations

import math
import statistics

import pytest

from daypack.lab import Record, RunResult, TrainConfig, compare, grid, summarise_runs
from daypack.lab.compare import Mean
from tests.lab.texts import config, task


def result(optimizer: str, seed: int, loss: float, lr: float = 1e-3) -> RunResult:
    records = (Record(1, 5.0, lr, None, 9.0, 1.0, None), Record(2, 4.0, lr, None, 3.0, 2.0, loss))
    return RunResult(
        config(optimizer=optimizer, seed=seed, lr=lr),
        records,
        parameters=100,
        state_bytes=800,
        weight_bytes=400,
        gradient_bytes=400,
    )


def test_mean_and_standard_error() -> None:
    mean = Mean.of([1.0, 2.0, 4.0])
    assert mean.value == pytest.approx(7 / 3)
    assert mean.error == pytest.approx(statistics.stdev([1, 2, 4]) / math.sqrt(3))
    assert Mean.of([1.0]) == Mean(1.0, None)
    assert str(Mean(1.0, None)) == "1.0000"
    assert str(Mean(1.0, 0.5)) == "1.0000 ± 0.5000"


def test_gaps_are_paired_by_seed() -> None:
    losses = {"adamw": [1.0, 2.0, 3.0], "gefen": [1.1, 2.2, 3.3]}
    summaries = summarise_runs([result(name, seed, losses[name][seed]) for seed in range(3) for name in losses])
    base, other = summaries
    assert (base.label, other.label) == ("adamw", "gefen")
    assert base.gap is None
    assert other.gap is not None
    assert other.gap.value == pytest.approx(0.2)
    assert other.gap.error == pytest.approx(0.1 / math.sqrt(3))
    assert other.loss is not None
    assert other.loss.value == pytest.approx(2.2)
    assert (other.seeds, other.steps, other.diverged) == (3, 12, 0)
    assert other.bytes_per_param == 8.0
    assert other.optimizer_ms == 3.0
    assert other.seconds == 2.0


def test_diverged_runs_are_counted_not_averaged() -> None:
    runs = [result("adamw", 0, 1.0), result("sgd", 0, math.nan), result("adamw", 1, 2.0), result("sgd", 1, 2.5)]
    base, sgd = summarise_runs(runs)
    assert sgd.diverged == 1
    assert sgd.loss == Mean(2.5, None)
    assert sgd.gap == Mean(0.5, None)
    (lost,) = summarise_runs([result("sgd", 0, math.inf)])
    assert lost.loss is None
    assert base.diverged == 0
    assert summarise_runs([]) == []


def test_learning_rates_are_told_apart() -> None:
    assert [s.lr for s in summarise_runs([result("adamw", 0, 1.0, 1e-3), result("adamw", 0, 1.0, 2e-3)])] == [
        1e-3,
        2e-3,
    ]


def test_the_grid_runs_every_optimizer_on_every_seed() -> None:
    runs = grid(config(lr=0.5, seed=7), ["adamw", "gefen"], 2, {"gefen": 0.25})
    assert [(run.optimizer, run.seed, run.lr) for run in runs] == [
        ("adamw", 7, 0.5),
        ("gefen", 7, 0.25),
        ("adamw", 8, 0.5),
        ("gefen", 8, 0.25),
    ]


def test_impossible_grids_are_refused() -> None:
    with pytest.raises(ValueError, match="different names, got none"):
        grid(config(), [], 1)
    with pytest.raises(ValueError, match="different names, got sgd, sgd"):
        grid(config(), ["sgd", "sgd"], 1)
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        grid(config(), ["sgd"], 0)
    with pytest.raises(ValueError, match="lr given for adam, which is not among the optimizers sgd"):
        grid(config(), ["sgd"], 1, {"adam": 1.0})


def test_a_comparison_reports_every_step_and_returns_every_run() -> None:
    seen: list[tuple[str, int, int]] = []

    def note(run: TrainConfig, record: Record) -> None:
        seen.append((run.optimizer, run.seed, record.step))

    results = compare(grid(config(steps=3), ["sgd", "adamw"], 2), task(), note)
    assert [(r.config.optimizer, r.config.seed) for r in results] == [
        ("sgd", 0),
        ("adamw", 0),
        ("sgd", 1),
        ("adamw", 1),
    ]
    assert len(seen) == 12
    assert seen[0] == ("sgd", 0, 1)
    assert seen[-1] == ("adamw", 1, 3)


def test_an_unknown_optimizer_is_found_before_any_training() -> None:
    seen: list[Record] = []
    with pytest.raises(ValueError, match="nosuch"):
        compare(grid(config(), ["sgd", "nosuch"], 1), task(), lambda _, record: seen.append(record))
    assert not seen
