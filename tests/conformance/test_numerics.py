"""First steps, zeros, huge and tiny numbers, and low precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from .scene import (
    assert_same,
    clone,
    gradient,
    noise,
    parameters,
    quietly,
    set_gradients,
    state_of,
    structured,
    train,
    values,
)
from .specs import Case, crossed


@crossed
def test_adapter_whose_first_gradient_is_zero_trains(case: Case) -> None:
    """LoRA: B starts at 0, so A's first gradient is exactly 0. A learns its structure and moves from the second on."""
    x, target = noise((64, 96), "x").float(), noise((64, 48), "y").float()

    def run(make: Any) -> tuple[list[float], Parameter]:
        start = 0.1 * noise((16, 96), "a").float()
        a, b = Parameter(start.clone()), Parameter(torch.zeros(48, 16))
        optimizer = make([a, b])
        losses = []
        for step in range(60):
            optimizer.zero_grad()
            loss = (x @ a.T @ b.T - target).square().mean()
            loss.backward()
            assert a.grad is not None
            assert (step > 0) == bool(a.grad.any())
            optimizer.step()
            losses.append(float(loss.detach()))
            assert torch.equal(a, start) == (step == 0)
        return losses, a

    options = {"lr": case.spec.adapter_lr, "weight_decay": 0.0}
    reference, _ = run(lambda params: case.namesake(params, **options))
    losses, _ = run(lambda params: case.create(params, **options))
    assert abs(losses[-1] - reference[-1]) < 0.05 * (reference[0] - reference[-1])


@pytest.mark.parametrize("decay", [0.0, 0.1])
@crossed
def test_coordinates_without_gradient_do_not_drift(case: Case, decay: float) -> None:
    """Zero gradient with zero history: decay only, beside large neighbours, for hundreds of steps; 0 decodes to 0."""
    shapes: dict[str, tuple[int, ...]] = {"m": (24, 520), "e": (4, 24, 64), "v": (200,)}
    params = parameters(shapes=shapes)
    optimizer = case.create(params.values(), lr=1e-2, weight_decay=decay)
    coupled = case.coupled and decay
    still = {name: noise(shape, "still", name) > 0.3 for name, shape in shapes.items()}
    if coupled:  # Their decay is a gradient, so that only the undecayed run tells.
        decay = 0.0
        optimizer.param_groups[0]["weight_decay"] = 0.0
    start = values(params)
    grads = [{n: gradient(n, s, step).float().masked_fill(still[n], 0) for n, s in shapes.items()} for step in range(5)]
    steps = 200
    for step in range(steps):
        for name, p in params.items():
            p.grad = grads[step % 5][name]
        optimizer.step()
    for name, p in params.items():
        kept = start[name].double() * (1 - 1e-2 * decay) ** steps
        torch.testing.assert_close(
            p.detach().double()[still[name]], kept[still[name]], rtol=2e-5 if decay else 0, atol=0, msg=name
        )
        assert not torch.equal(p[~still[name]], start[name][~still[name]])


@crossed
def test_all_zero_gradients_teach_nothing(case: Case) -> None:
    """They move nothing and count as steps; the first real gradient then teaches what it teaches a fresh run."""
    (optimizer, mine), (reference, fresh) = zeros_then(case, 3), zeros_then(case, 0)
    for name, p in mine.items():
        assert p.isfinite().all()
        state, wanted = optimizer.state[p], reference.state[fresh[name]]
        for key in ("exp_avg_codebook", "exp_avg_sq_block_size"):
            assert_same(state.get(key), wanted.get(key), f"{name} {key}")
        if "step" in state:
            assert (state["step"], wanted["step"]) == (5, 2)


def zeros_then(case: Case, zeros: int) -> tuple[torch.optim.Optimizer, dict[str, Parameter]]:
    shapes: dict[str, tuple[int, ...]] = {"m": (24, 768), "e": (4, 24, 64), "v": (9,)}
    params = parameters(shapes=shapes)
    optimizer = case.create(params.values(), weight_decay=0.0)
    for _ in range(zeros):
        for p in params.values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert_same(values(params), values(parameters(shapes=shapes)))
    for step in range(2):
        set_gradients(params, step)
        params["m"].grad = structured(24, 768, 48, step).float()
        optimizer.step()
    return optimizer, params


@crossed
def test_zero_gradient_at_rate_zero_is_a_step_once_training_began(case: Case) -> None:
    """Only before the first step is that combination a probe for state; later it is a step whose moments decay."""
    params = parameters(shapes={"m": (24, 520), "v": (9,)})
    optimizer = case.create(params.values())
    train(optimizer, params, range(2))
    before, state = values(params), state_of(optimizer, params)
    optimizer.param_groups[0]["lr"] = 0.0
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(values(params), before)
    for name, was in state.items():
        now = state_of(optimizer, params)[name]
        if "step" in was:
            assert now["step"] == was["step"] + 1
            decayed = [key for key in now if key.startswith("exp_avg_sq") and now[key].is_floating_point()]
            assert decayed
            for key in decayed:
                torch.testing.assert_close(now[key], was[key] * 0.999, msg=key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@crossed
def test_half_precision_survives_zero_and_small_gradients(case: Case, dtype: torch.dtype) -> None:
    """eps is 0 in fp16 and (1e-4)^2 underflows there: fp32 arithmetic moves such parameters by the learning rate."""
    params = parameters(dtype)
    optimizer = case.create(params.values(), lr=2e-2, weight_decay=0.0)
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(values(params), values(parameters(dtype)))
    params = parameters(dtype)
    optimizer = case.create(params.values(), lr=2e-2, weight_decay=0.0)
    for _ in range(2):
        for p in params.values():
            p.grad = torch.full_like(p, 1e-4)
        optimizer.step()
    for name, p in params.items():
        moved = parameters(dtype)[name].detach().float() - p.detach().float()
        torch.testing.assert_close(moved, torch.full_like(moved, 4e-2), rtol=0.05, atol=1.7e-2, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@crossed
def test_half_precision_is_rounded_once(case: Case, dtype: torch.dtype) -> None:
    """Decay and update in fp32, one rounding: each step is the fp32 optimizer's from the same values, rounded."""
    half, wide = parameters(dtype), parameters()
    wide = {name: Parameter(half[name].detach().float()) for name in wide}
    low = case.create(half.values(), lr=1e-2, weight_decay=0.1)
    high = case.create(wide.values(), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        set_gradients(half, step)
        for name, p in wide.items():
            p.data = half[name].detach().float()
            p.grad = half[name].grad.float()
        low.step()
        high.step()
        assert_same(values(half), {name: p.to(dtype) for name, p in values(wide).items()}, f"step {step}")
    assert_same(state_of(low, half), state_of(high, wide))


@crossed
def test_gradient_of_another_dtype_than_the_parameter(case: Case) -> None:
    """fp32 parameters whose gradients are kept in bf16: every formula upcasts, nothing trips over the pair."""
    params, others = parameters(), parameters()
    optimizer, reference = case.create(params.values()), case.create(others.values())
    for p in params.values():
        p.grad_dtype = torch.bfloat16
    for step in range(3):
        for name, p in params.items():
            p.grad = gradient(name, p.shape, step).to(torch.bfloat16)
            others[name].grad = p.grad.float()
        optimizer.step()
        reference.step()
    assert_same(values(params), values(others))
    assert_same(state_of(optimizer, params), state_of(reference, others))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-12, 1e10, 1e18, 1e25, 1e37])
@crossed
def test_huge_and_tiny_gradients(case: Case, size: float) -> None:
    """Squares that overflow or vanish in fp32: parameters stay finite, their steps bounded, and they train on."""
    params = parameters(shapes={"m": (24, 520), "e": (4, 24, 64), "v": (200,)})
    optimizer = case.create(params.values(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        before = values(params)
        for name, p in params.items():
            p.grad = (size * noise(p.shape, name, step)).float()
        quietly(optimizer)
        for name, p in params.items():
            moved = (p.detach() - before[name]).abs().max()
            assert moved.isfinite(), (name, step)
            # A parameter of n elements steps at most sqrt(n) lr where v is shared; far more is an overflow.
            assert moved <= 1e-3 * math.sqrt(p.numel()), (name, step, moved)
            if 1e-6 < size <= 1e10:
                assert moved > 1e-4, (name, step, moved)
    train(optimizer, params, range(3, 5))
    assert all(p.isfinite().all() for p in params.values())


@crossed
def test_rows_and_columns_of_very_different_size(case: Case) -> None:
    """Fifteen orders of magnitude within one matrix: every entry with a gradient moves, none by more than the bound."""
    p = Parameter(torch.zeros(40, 512))
    rows, columns = torch.logspace(-8, 2, 40)[:, None], torch.logspace(-2, 3, 512)[None, :]
    optimizer = case.create([p], lr=1e-3, weight_decay=0.0)
    if case.spec.namesake is torch.optim.SGD:
        optimizer.param_groups[0]["lr"] = 1e-9
    p.grad = rows * columns * noise(p.shape, "sign").sign().float()
    optimizer.step()
    assert p.isfinite().all()
    assert (p != 0).float().mean() > 0.9
    if (
        case.spec.namesake is not torch.optim.SGD and not case.shares_v
    ):  # g^2 has rank one: everything moves by the rate.
        moved = p.detach().abs()
        assert moved.max() < 1.01e-3
        assert (moved > 0.9e-3).float().mean() > 0.9


@crossed
def test_tiny_parameters_train(case: Case) -> None:
    """One, two, three elements, as scalars, vectors and rows: each moves towards its target like in AdamW."""
    shapes: dict[str, tuple[int, ...]] = {
        "0": (),
        "1": (1,),
        "11": (1, 1),
        "12": (1, 2),
        "31": (3, 1),
        "111": (1, 1, 1),
    }
    params = {name: Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = case.create(params.values(), lr=1e-2, weight_decay=0.0)
    for _ in range(40):
        for p in params.values():
            p.grad = 2 * p.detach()
        optimizer.step()
    for name, p in params.items():
        assert (p < 0.8).all(), (name, p)
        assert p.isfinite().all()


@crossed
def test_decay_means_what_it_means_in_the_namesake(case: Case) -> None:
    """Defaults and an explicit decay, on vectors, where ours are the namesake's moments: the same trajectory."""
    shapes: dict[str, tuple[int, ...]] = {"v": (300,), "s": (), "w": (7,)}
    for options in ({}, {"weight_decay": 0.1}, {"weight_decay": 0.0}):
        params, others = parameters(shapes=shapes), parameters(shapes=shapes)
        optimizer = case.create(params.values(), **options)
        reference = case.namesake(others.values(), **options)
        assert optimizer.defaults["weight_decay"] == reference.defaults["weight_decay"]
        train(optimizer, params, range(20))
        train(reference, others, range(20))
        for name in shapes:
            torch.testing.assert_close(params[name], others[name], rtol=1e-5, atol=1e-6)


@crossed
def test_decay_in_low_precision_is_not_lost(case: Case) -> None:
    """lr x decay of 1e-2 against bf16's 2^-8: one rounding of p (1 - lr wd) moves every weight whose ulp allows."""
    p = Parameter(noise((24, 520), "p").bfloat16())
    start = p.detach().clone()
    optimizer = case.create([p], lr=0.1, weight_decay=0.1)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    if not case.coupled and case.spec.name != "lamb":  # whose trust ratio scales the decay
        assert_same(p.detach(), (start.double() * 0.99).bfloat16())
    assert (p.abs() < start.abs()).float().mean() > 0.9 or case.spec.name == "adam"


@pytest.mark.parametrize("decays", [False, True], ids=["update", "decay"])
@crossed
def test_small_steps_add_up_in_fp32_and_are_lost_in_bf16(case: Case, decays: bool) -> None:
    """1e-5 of a weight, 200 times, by gradients or by decay alone. Rounded to nearest, 16 bits do not hold it; torch's
    own optimizers lose it as well, so that small rates want fp32 weights."""
    for dtype in (torch.float32, torch.bfloat16):
        p = Parameter(torch.ones(24, 520, dtype=dtype))
        optimizer = case.create([p], lr=1e-5, weight_decay=1.0 if decays else 0.0)
        for _ in range(200):
            p.grad = torch.zeros_like(p) if decays else torch.ones_like(p)
            optimizer.step()
        if dtype == torch.bfloat16:
            assert (p == 1).all()
            continue
        assert p.double().mean() < 1 - 1e-6
        if decays and not case.coupled:
            torch.testing.assert_close(p.detach(), torch.full_like(p, (1 - 1e-5) ** 200), rtol=0, atol=2e-5)


@crossed
def test_long_run_with_heavy_tails_stays_stable(case: Case) -> None:
    """A thousand noisy steps with outliers around a quadratic: ends near the optimum, as the namesake does."""
    target = noise((16, 512), "target").float()

    def run(make: Any) -> float:
        p = Parameter(torch.zeros(16, 512))
        optimizer = make([p])
        generator = torch.Generator().manual_seed(5)
        for step in range(1000):
            optimizer.param_groups[0]["lr"] = 2e-2 * (1 - step / 1000)
            outliers = torch.randn(p.shape, generator=generator)
            p.grad = (p.detach() - target) + 0.3 * outliers / outliers.roll(1).abs().clamp_min(0.05)
            optimizer.step()
        return float((p.detach() - target).square().mean())

    reference = run(lambda params: case.namesake(params, weight_decay=0.0, lr=0.02))
    ours = run(lambda params: case.create(params, weight_decay=0.0))
    assert ours < 1.2 * reference + 1e-3, (ours, reference)


@crossed
def test_runs_are_deterministic(case: Case) -> None:
    def run() -> dict[str, Any]:
        params = parameters()
        optimizer = case.create(clone(params).values())
        mine = dict(zip(params, optimizer.param_groups[0]["params"], strict=True))
        train(optimizer, mine, range(4))
        return {"values": values(mine), "state": state_of(optimizer, mine)}

    assert_same(run(), run())
