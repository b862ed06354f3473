from __future__ import annotations

import json
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch

from daypack.lab import TrainConfig
from daypack.lab.config import with_threads
from daypack.lab.options import COMPARE, TRAIN, flag, option_of
from tests.lab.texts import config


def test_schedule_warms_up_and_cools_down_to_zero() -> None:
    run = config(steps=100, warmup=10, lr=1.0)
    rates = [run.learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[54] == pytest.approx(0.5)
    assert all(earlier > later for earlier, later in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)


def test_schedule_can_end_above_zero_and_copes_with_few_steps() -> None:
    assert config(steps=50, final_lr=0.1, lr=2.0).learning_rate(49) == pytest.approx(0.2)
    assert config(steps=1, warmup=50, lr=1.0).learning_rate(0) == pytest.approx(0.0)
    assert config(steps=4, warmup=50, lr=1.0).learning_rate(1) == pytest.approx(1.0)
    assert config(steps=4, warmup=0, lr=1.0).learning_rate(0) < 1.0


def test_the_last_step_is_always_evaluated() -> None:
    assert [step for step in range(1, 11) if config(steps=10, eval_every=4).evaluates_after(step)] == [4, 8, 10]
    assert [step for step in range(1, 4) if config(steps=3, eval_every=None).evaluates_after(step)] == [1, 2, 3]
    assert sum(config(steps=200, eval_every=None).evaluates_after(step) for step in range(1, 201)) == 10


def test_json_holds_all_of_it() -> None:
    run = config(options={"second_moment": "blocks"}, clip=None)
    assert TrainConfig.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    with pytest.raises(ValueError, match="unknown training options \\['speed'\\]"):
        TrainConfig.from_dict({"speed": 1})


def test_labels_name_the_options_but_not_the_seed() -> None:
    assert config(optimizer="gefen", seed=3).label == "gefen"
    assert config(optimizer="gefen", options={"second_moment": "blocks"}).label == "gefen (second_moment=blocks)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -5}, "steps must be at least 1, got -5"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"eval_every": 0}, "eval_every must be at least 1, got 0"),
        ({"lr": float("nan")}, "lr must be a finite number of at least 0, got nan"),
        ({"lr": -1.0}, "lr must be"),
        ({"seed": -1}, "seed must lie in"),
        ({"dtype": "float8"}, "unknown dtype 'float8'; choose one of float32, bfloat16, float64"),
        ({"model": "huge"}, "unknown model 'huge'; choose one of tiny"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_small_models_use_one_thread_unless_told_otherwise() -> None:
    assert with_threads(config(model="small", threads=None)).threads == 1
    assert with_threads(config(model="medium", threads=None)).threads == torch.get_num_threads()
    assert with_threads(config(model="small", threads=3)).threads == 3


def test_every_field_is_described_once() -> None:
    for entry in fields(TrainConfig):
        assert option_of(entry).help.endswith("."), entry.name
        assert {*option_of(entry).commands} <= {COMPARE, TRAIN}


@pytest.mark.parametrize("command", [COMPARE, TRAIN])
def test_commands_take_the_options_of_the_table(command: str) -> None:
    from typer.main import get_command

    from daypack.cli.app import app

    flags = {text for parameter in get_command(app).commands[command].params for text in parameter.opts}
    listed = {entry.name for entry in fields(TrainConfig) if command in option_of(entry).commands}
    assert {flag(name) for name in listed} <= flags
    rest = {entry.name for entry in fields(TrainConfig)} - listed
    assert not {flag(name) for name in rest - {"lr"}} & flags  # compare has a --lr of its own, one for each optimizer
