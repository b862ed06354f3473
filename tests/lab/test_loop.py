from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch

import daypack
from daypack.lab import Job, Record, run
from daypack.lab.loop import require_device, thread_count
from tests.lab.texts import config, task


@pytest.mark.parametrize("optimizer", daypack.names())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_repeats_itself_and_leaves_the_global_generator_alone(optimizer: str, dtype: str) -> None:
    before, text = torch.get_rng_state(), task()
    first, second = (run(config(optimizer=optimizer, dtype=dtype, steps=4, seed=5), text) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert [(r.loss, r.validation) for r in first.records] == [(r.loss, r.validation) for r in second.records]
    assert all(math.isfinite(record.loss) for record in first.records)


def test_training_learns() -> None:
    result = run(config(optimizer="adamw", steps=60, lr=5e-3, eval_every=60), task())
    assert result.records[0].loss == pytest.approx(math.log(256), abs=0.2)
    assert result.validation_loss < 2.5


def test_every_optimizer_starts_from_the_same_weights_and_sees_the_same_batches() -> None:
    text = task()
    seen: dict[str, list[torch.Tensor]] = {}
    for name in ("adamw", "gefen", "sgd"):
        job = Job(config(optimizer=name, steps=2), text)
        seen[name] = [weight.clone() for weight in job.model.state_dict().values()]
        seen[name] += [torch.tensor([record.loss]) for record in job.train()][:1]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*seen.values(), strict=True))


def test_seeds_change_weights_and_batches() -> None:
    losses = {run(config(optimizer="sgd", steps=1, seed=seed), task()).records[0].loss for seed in range(3)}
    assert len(losses) == 3


def test_records_follow_the_schedule() -> None:
    settings = config(optimizer="adamw", clip=0.5)
    seen: list[Record] = []
    result = run(settings, task(), seen.append)
    assert tuple(seen) == result.records
    assert [record.step for record in seen] == list(range(1, 13))
    assert [record.lr for record in seen] == [settings.learning_rate(step) for step in range(12)]
    assert [step for step, _ in result.validation_curve] == [4, 8, 12]
    assert all(record.grad_norm is not None and record.grad_norm > 0 for record in seen)
    assert all(earlier.seconds < later.seconds for earlier, later in pairwise(seen))
    assert run(config(optimizer="adamw", clip=None, steps=1), task()).records[0].grad_norm is None
    for record in seen:
        assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_clipping_bounds_what_the_optimizer_sees() -> None:
    # Plain SGD at lr 1 moves the weights by exactly the gradient that it is given.
    job = Job(config(optimizer="sgd", lr=1.0, weight_decay=0.0, clip=0.01, warmup=0, steps=1000), task())
    before = [weight.detach().clone() for weight in job.model.parameters()]
    record = job.advance()
    moved = (
        sum(float((a - b.detach()).square().sum()) for a, b in zip(before, job.model.parameters(), strict=True)) ** 0.5
    )
    assert record.grad_norm is not None
    assert record.grad_norm > 0.01
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_evaluation_is_the_mean_loss_of_the_held_out_windows() -> None:
    job = Job(config(optimizer="adamw", eval_tokens=512), task())
    windows = torch.cat(list(job.task.held_out(job.config)))
    assert len(windows) == 32
    loss, accuracy = job.evaluate()
    assert loss == pytest.approx(float(job.model.loss(windows).detach()), rel=1e-5)
    assert accuracy == float((job.model(windows[:, :-1]).argmax(-1) == windows[:, 1:]).float().mean())
    assert job.evaluate() == job.evaluate()


def test_bytes_are_measured_on_the_optimizer() -> None:
    text = task()
    adamw, gefen, sgd = (run(config(optimizer=name, steps=2), text) for name in ("adamw", "gefen", "sgd"))
    assert 8 <= adamw.bytes_per_param < 8.01
    assert gefen.bytes_per_param < 1.5
    assert sgd.bytes_per_param == 0
    assert adamw.parameters == gefen.parameters
    json.dumps(adamw.summary())


def test_the_step_time_leaves_the_first_step_out() -> None:
    result = run(config(optimizer="adamw", steps=4), task())
    times = sorted(record.optimizer_ms for record in result.records[1:])
    assert result.optimizer_ms == times[1]
    assert run(config(optimizer="adamw", steps=1), task()).optimizer_ms > 0


def test_options_reach_the_optimizer() -> None:
    job = Job(config(optimizer="gefen", options={"betas": [0.8, 0.9]}), task())
    assert tuple(job.optimizer.defaults["betas"]) == (0.8, 0.9)
    decays = {group["weight_decay"] for group in job.optimizer.param_groups}
    assert decays == {0.0, 0.1}


def test_a_diverged_run_is_json_too() -> None:
    result = run(config(optimizer="sgd", lr=1e30, clip=None, warmup=0, steps=3), task())
    assert not math.isfinite(result.validation_loss)
    assert result.summary()["validation_loss"] is None
    json.dumps([record.to_dict() for record in result.records], allow_nan=False)


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with thread_count(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
    with thread_count(None):
        assert torch.get_num_threads() == before


def test_bad_choices_are_named() -> None:
    with pytest.raises(ValueError, match="nosuch"):
        Job(config(optimizer="nosuch"), task())
    with pytest.raises(ValueError, match=r"optimizer 'adamw' does not take \{'speed': 2\}"):
        Job(config(optimizer="adamw", options={"speed": 2}), task())
    with pytest.raises(ValueError, match=r"cannot use device 'warp'.*; try --device cpu"):
        require_device("warp")
    with pytest.raises(ValueError, match="'meta'"):
        require_device("meta")
    with pytest.raises(ValueError, match="corpus too small"):
        Job(config(optimizer="adamw", context=100_000), task())
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cannot use device 'cuda'"):
            require_device("cuda")
