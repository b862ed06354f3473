"""Gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from .scene import assert_same, parameters, quietly, set_gradients, snapshot, state_of, train, values
from .specs import Case, crossed

BAD_VALUES = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("bad", BAD_VALUES, ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first-step", "later-step"])
@crossed
def test_nonfinite_gradient_skips_its_parameter_alone(case: Case, first: bool, bad: float) -> None:
    """Values, state and step stay; it is named in one warning; the others step as if nothing had happened."""
    for name in ("matrix", "experts", "vector", "scalar"):
        params, others = parameters(), parameters()
        optimizer, reference = case.create(params.items()), case.create(others.items())
        if not first:
            train(optimizer, params, range(2))
            train(reference, others, range(2))
        before, state = params[name].detach().clone(), state_of(optimizer, params).get(name)
        set_gradients(params, 2)
        set_gradients(others, 2, without=(name,))
        params[name].grad.view(-1)[-1] = bad
        said = quietly(optimizer)
        reference.step()
        assert_same(params[name].detach(), before, name)
        if state is not None:
            assert_same(state_of(optimizer, params)[name], state, name)
        else:
            assert optimizer.state.get(params[name], {}).get("step", 0) == 0
        rest = [other for other in params if other != name]
        assert_same({n: values(params)[n] for n in rest}, {n: values(others)[n] for n in rest})
        assert_same(
            {n: state_of(optimizer, params)[n] for n in rest}, {n: state_of(reference, others)[n] for n in rest}
        )
        assert len(said) == 1, said
        assert repr(name) in said[0] or f" {name}" in said[0]
        assert quietly(optimizer) == [], "warned twice of one parameter"


@crossed
def test_nonfinite_gradient_teaches_nothing(case: Case) -> None:
    """A first gradient that is NaN freezes no codebook and no structure: the run after it is the run without it."""
    params, others = parameters(), parameters()
    optimizer, reference = case.create(params.values()), case.create(others.values())
    for bad in BAD_VALUES:
        for p in params.values():
            p.grad = torch.full_like(p, 1.0)
            if p.numel():
                p.grad.view(-1)[0] = bad
        quietly(optimizer)
    filled = {name: p for name, p in params.items() if p.numel()}
    assert_same(values(params), values(others))
    train(optimizer, params, range(3))
    train(reference, others, range(3))
    assert_same(values(params), values(others))
    mine, theirs = state_of(optimizer, params), state_of(reference, others)
    assert_same({name: mine[name] for name in filled}, {name: theirs[name] for name in filled})


@crossed
def test_nonfinite_raise_changes_nothing(case: Case) -> None:
    params = parameters()
    optimizer = case.create(params.items(), nonfinite="raise")
    for step in range(2):
        before = snapshot(optimizer, params)
        for name in ("vector", "embedding"):
            set_gradients(params, step)
            params[name].grad.view(-1)[3] = math.nan
            with pytest.raises(ValueError, match=name):
                optimizer.step()
            after = snapshot(optimizer, params)
            assert_same(after["values"], before["values"])
            touched = {n: s for n, s in after["state"].items() if n in before["state"] or s.get("step", 0) != 0}
            assert_same(touched, before["state"])
        train(optimizer, params, [step])
