"""Parameters that come, go, rest and are swapped under the optimizer, as wrappers and fine-tuning do it."""

from __future__ import annotations

import warnings

import torch
from torch.nn import Parameter

from .scene import assert_same, clone, gradient, parameters, set_gradients, snapshot, state_of, train, values
from .specs import Case, crossed


@crossed
def test_parameter_without_gradient_is_untouched(case: Case) -> None:
    """No decay, no step, whatever the others do; a parameter that had gradients once keeps its state."""
    params = parameters()
    optimizer = case.create(params.values(), weight_decay=0.5)
    train(optimizer, params, range(2))
    before, state = values(params), state_of(optimizer, params)
    train(optimizer, params, range(2, 4), without=("matrix", "vector", "experts"))
    for name in ("matrix", "vector", "experts"):
        assert_same(params[name].detach(), before[name], name)
        assert_same(state_of(optimizer, params).get(name), state.get(name), name)
    assert not torch.equal(params["conv"], before["conv"])
    for p in params.values():
        p.grad = None
    everything = snapshot(optimizer, params)
    optimizer.step()
    assert_same(snapshot(optimizer, params)["values"], everything["values"])


@crossed
def test_unfrozen_parameter_trains_from_its_own_first_step(case: Case) -> None:
    """Frozen at construction, unfrozen later: it moves as far as a new one in its first step."""
    params = parameters()
    frozen = ("matrix", "vector")
    for name in frozen:
        params[name].requires_grad_(False)
    optimizer = case.create(params.values(), weight_decay=0.0)
    train(optimizer, params, range(3), without=frozen)
    fresh = parameters()
    for name in frozen:
        params[name].requires_grad_(True)
        assert_same(params[name].detach(), fresh[name].detach(), name)
    train(optimizer, params, [3])
    train(case.create(fresh.values(), weight_decay=0.0), fresh, [3])
    for name in frozen:
        assert_same(params[name].detach(), fresh[name].detach(), name)
        if "step" in optimizer.state[params[name]]:
            assert optimizer.state[params[name]]["step"] == 1
            assert optimizer.state[params["conv"]]["step"] == 4


@crossed
def test_group_added_late_trains_with_its_own_options(case: Case) -> None:
    params = parameters()
    optimizer = case.create(params.values())
    train(optimizer, params, range(3))
    late = {f"late {name}": p for name, p in parameters(seed=9, shapes={"m": (16, 300), "v": (5,)}).items()}
    optimizer.add_param_group({"params": late.values(), "lr": 0.25, "weight_decay": 0.0})
    before = values(late)
    train(optimizer, params | late, [3])
    alone = {name: Parameter(value.clone()) for name, value in before.items()}
    train(case.create(alone.values(), lr=0.25, weight_decay=0.0), alone, [3])
    assert_same(values(late), values(alone))
    train(optimizer, params | late, range(4, 6))
    for name, p in late.items():
        assert p.isfinite().all()
        assert not torch.equal(p, before[name])
        if "step" in optimizer.state[p]:
            assert optimizer.state[p]["step"] == 3


@crossed
def test_late_parameter_keeps_its_momentum(case: Case) -> None:
    """What arrives after the codebook was learned must not store noise: it follows a run in which it came first."""
    shapes: dict[str, tuple[int, ...]] = {"m": (32, 512)}
    early, late = parameters(shapes=shapes), parameters(shapes=shapes)
    others = parameters(seed=4)
    optimizer = case.create(others.values())
    train(optimizer, others, range(2))
    optimizer.add_param_group({"params": late.values()})
    reference = case.create(early.values())
    for step in range(8):
        train(optimizer, others | late, [step])
        train(reference, early, [step])
    start = parameters(shapes=shapes)["m"]
    moved, wanted = (late["m"] - start).flatten(), (early["m"] - start).flatten()
    assert torch.cosine_similarity(moved, wanted, 0) > 0.99


@crossed
def test_swapped_parameters_are_the_ones_that_train(case: Case) -> None:
    """Sharding libraries replace the tensors in the groups after construction: nothing may be cached about the old."""
    old = parameters()
    optimizer = case.create(old.values())
    assert not optimizer.state
    new = parameters(seed=5)
    reference_params = clone(new)
    for group in optimizer.param_groups:
        group["params"] = [new[name] for name in old]
    train(optimizer, new, range(2))
    train(case.create(reference_params.values()), reference_params, range(2))
    assert_same(values(new), values(reference_params))
    assert_same(values(old), values(parameters()))
    assert set(optimizer.state) <= set(new.values())
    optimizer.state_dict()


@crossed
def test_placeholders_swapped_for_shapes_known_later(case: Case) -> None:
    optimizer = case.create([Parameter(torch.empty(0)), Parameter(torch.empty(1))])
    new = parameters(shapes={"a": (24, 520), "b": (33,)})
    optimizer.param_groups[0]["params"] = list(new.values())
    expected = clone(new)
    train(optimizer, new, range(3))
    train(case.create(expected.values()), expected, range(3))
    assert_same(values(new), values(expected))


@crossed
def test_swap_after_training_does_not_break_saving(case: Case) -> None:
    """Entries of tensors that are in no group any more are left behind, not fatal and not saved."""
    params = parameters()
    optimizer = case.create(params.values())
    train(optimizer, params, range(2))
    new = clone(params)
    optimizer.param_groups[0]["params"] = list(new.values())
    train(optimizer, new, range(2))
    if case.spec.ours:  # torch raises KeyError for the orphans
        saved = optimizer.state_dict()
        assert set(saved["state"]) <= set(range(len(new)))
    assert not torch.equal(new["matrix"], params["matrix"])


@crossed
def test_one_optimizer_per_parameter_equals_itself_in_backward(case: Case) -> None:
    """Stepping inside backward, one optimizer each: the hook's gradient is stepped once, then freed."""
    params, others = (parameters(shapes={"a": (24, 520), "b": (130,)}) for _ in range(2))
    optimizers = {name: case.create([p]) for name, p in params.items()}
    for name, p in params.items():

        def hook(p: torch.Tensor, name: str = name) -> None:
            optimizers[name].step()
            optimizers[name].zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    reference = {name: case.create([p]) for name, p in others.items()}
    for step in range(3):
        loss = sum((p * gradient(name, p.shape, step).float()).sum() for name, p in params.items())
        loss.backward()
        set_gradients(others, step)
        for optimizer in reference.values():
            optimizer.step()
    assert all(p.grad is None for p in params.values())
    assert_same(values(params), values(others))


@crossed
def test_optimizer_that_never_sees_a_gradient_says_so(case: Case) -> None:
    """Built before the model was wrapped, it steps tensors that nothing trains: one warning, not silence."""
    stale = parameters()
    optimizer = case.create(stale.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            optimizer.step()
    assert len(caught) == 1
    assert "gradient" in str(caught[0].message)
    busy = parameters()
    optimizer = case.create(busy.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, busy, range(1))
        for p in busy.values():
            p.grad = None
        for _ in range(200):
            optimizer.step()
