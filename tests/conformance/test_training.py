"""In a training loop: closures, schedulers, scalers, hooks, and what a step must leave alone."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .scene import (
    assert_same,
    clone,
    noise,
    parameters,
    set_gradients,
    snapshot,
    state_of,
    train,
    values,
)
from .specs import Case, crossed


@crossed
def test_closure_runs_once_first_and_with_gradients(case: Case) -> None:
    """As the very first call, when no gradient exists yet; its loss is what `step` returns."""
    params = parameters()
    optimizer = case.create(params.values())
    calls: list[bool] = []
    before = values(params)

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        assert_same(values(params), before)
        optimizer.zero_grad()
        loss = sum((p * noise(p.shape, name).float()).sum() for name, p in params.items())
        loss.backward()
        return loss

    for keyword in (False, True):
        with torch.no_grad():
            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert isinstance(loss, torch.Tensor)
        assert torch.isfinite(loss)
        before = values(params)
    assert calls == [True, True]
    assert not torch.equal(params["matrix"], parameters()["matrix"])
    assert optimizer.step() is None


@crossed
def test_closure_equals_a_plain_step(case: Case) -> None:
    params, others = parameters(), parameters()
    with_closure, plain = case.create(params.values()), case.create(others.values())
    for step in range(3):

        def closure(step: int = step) -> float:
            set_gradients(params, step)
            return 1.5

        assert with_closure.step(closure) == 1.5
        train(plain, others, [step])
    assert_same(values(params), values(others))


@crossed
def test_step_hooks_fire_once(case: Case) -> None:
    params = parameters()
    optimizer = case.create(params.values())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    try:
        train(optimizer, params, range(2))
    finally:
        handle.remove()
    assert [call for call in calls if call != "global"] == ["before", "after"] * 2
    assert calls.count("global") == 2


@crossed
def test_warm_up_from_zero_advances_state_and_moves_nothing(case: Case) -> None:
    """The scheduler's first rate is exactly 0, with real gradients: the step counts and moments fill, weights stay."""
    params = parameters()
    optimizer = case.create(params.values())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
    train(optimizer, params, [0])
    scheduler.step()
    assert_same(values(params), values(parameters()))
    if case.label != "plain":  # SGD without momentum has no state.
        for name, state in state_of(optimizer, params).items():
            if params[name].numel():  # An empty gradient cannot be told from the all-zero one that creates state.
                assert state.get("step", 1) == 1, name
                moments = [t for key, t in state.items() if torch.is_tensor(t) and key != "step"]
                assert all(t.any() for t in moments), name
    train(optimizer, params, [1])
    for name, p in params.items():
        assert p.isfinite().all(), name
        assert p.numel() == 0 or not torch.equal(p, parameters()[name]), name


@pytest.mark.parametrize("kind", ["onecycle", "cyclic", "plateau", "cosine"])
@crossed
def test_schedulers_drive_the_update(case: Case, kind: str) -> None:
    """Cycled momentum must reach the update: the same run with it held still goes elsewhere."""

    def run(cycle: bool) -> Any:
        params = parameters(shapes={"matrix": (24, 520), "vector": (130,)})
        optimizer = case.create(params.values())
        lr = torch.optim.lr_scheduler
        scheduler: Any
        if kind == "onecycle":
            scheduler = lr.OneCycleLR(optimizer, 1e-2, total_steps=10, cycle_momentum=cycle)
        elif kind == "cyclic":
            scheduler = lr.CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=3, cycle_momentum=cycle)
        elif kind == "plateau":
            scheduler = lr.ReduceLROnPlateau(optimizer, patience=0)
        else:
            scheduler = lr.CosineAnnealingLR(optimizer, 6)
        rates = []
        for step in range(6):
            rates.append(optimizer.param_groups[0]["lr"])
            train(optimizer, params, [step])
            scheduler.step(*([1.0] if kind == "plateau" else []))
        assert len(set(rates)) > 2
        assert all(p.isfinite().all() for p in params.values())
        return values(params)

    momentum = {"betas", "momentum"} & set(case.create(parameters().values()).defaults)
    cycles = case.label != "plain" and momentum and kind in ("onecycle", "cyclic")
    if cycles:
        assert not torch.equal(run(True)["matrix"], run(False)["matrix"])
    else:
        assert not torch.equal(run(False)["matrix"], parameters(shapes={"matrix": (24, 520)})["matrix"])


@crossed
def test_scaler_that_skips_leaves_no_trace(case: Case) -> None:
    """An overflow at the first step, a skip later, unscale and clipping: as if the skipped steps had not been there."""
    params, others = parameters(), parameters()
    optimizer, reference = case.create(params.values()), case.create(others.values())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step, overflow in enumerate([True, False, True, False]):
        set_gradients(params, step)
        scaler.scale(torch.ones(1))  # creates the scale
        for p in params.values():
            p.grad.mul_(scaler.get_scale())
        if overflow:
            params["matrix"].grad[3, 7] = torch.inf
        before = snapshot(optimizer, params)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params.values(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert_same(snapshot(optimizer, params), before)
            continue
        set_gradients(others, step)
        nn.utils.clip_grad_norm_(others.values(), 0.5)
        reference.step()
    assert_same(values(params), values(others))
    assert_same(state_of(optimizer, params), state_of(reference, others))


@crossed
def test_global_generators_are_not_used(case: Case) -> None:
    """Replicas with different seeds stay identical, and a run is what its gradients make it."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the global generator is the point
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
        params = parameters(torch.bfloat16)
        optimizer = case.create(params.values())
        train(optimizer, params, range(3))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
        assert random.getstate() == before[2]
        runs.append({"values": values(params), "state": state_of(optimizer, params)})
    assert_same(runs[0], runs[1])


@crossed
def test_step_leaves_the_gradient_alone(case: Case) -> None:
    params = parameters()
    optimizer = case.create(params.values(), maximize=True)
    for step in range(2):
        set_gradients(params, step)
        before = {name: p.grad.clone() for name, p in params.items()}
        optimizer.step()
        assert_same({name: p.grad for name, p in params.items()}, before)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params.values())


@crossed
def test_training_is_quiet(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    """Ordinary use of ordinary parameters prints nothing and warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = parameters()
        optimizer = case.create(params.values())
        train(optimizer, params, range(3))
        case.create(clone(params).values()).load_state_dict(optimizer.state_dict())
    assert capfd.readouterr() == ("", "")


@crossed
def test_loss_goes_down_as_with_the_namesake(case: Case) -> None:
    """A small regression with weight decay: what the namesake gains, to 2 %."""
    inputs, teacher = noise((256, 96), "x").float(), noise((96, 32), "w").float()
    targets = torch.tanh(inputs @ teacher * 0.2)

    def run(make: Any) -> tuple[float, float]:
        model = nn.Sequential(nn.Linear(96, 320), nn.Tanh(), nn.Linear(320, 32))
        for name, p in model.named_parameters():
            p.data = 0.08 * noise(p.shape, "start", name).float()
        optimizer, losses = make(model.parameters()), []
        for _ in range(150):
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses[0], losses[-1]

    options: dict[str, Any] = {"lr": case.spec.fit_lr, "weight_decay": 1e-2}
    start, reference = run(lambda params: case.namesake(params, **options))
    _, ours = run(lambda params: case.create(params, **options))
    assert reference < 0.1 * start
    assert ours - reference < 0.02 * (start - reference), (start, reference, ours)
