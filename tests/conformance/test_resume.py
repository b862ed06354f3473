"""Saving and continuing: what comes back is what was there, to the bit, and goes on as if nothing had happened."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import daypack

from .scene import (
    FLOATS,
    SHAPES,
    assert_same,
    clone,
    noise,
    parameters,
    set_gradients,
    snapshot,
    state_bytes,
    state_of,
    structured,
    tensors,
    through_file,
    train,
    values,
)
from .specs import CASES, Case, crossed

STEPS = 6


def run_to(case: Case, dtype: torch.dtype, steps: int, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Trained for ``steps``; the vector gets its first gradient at step 2 (from 0), as an unfrozen one does."""
    params = parameters(dtype)
    optimizer = case.create(params.values(), **options)
    train_late(optimizer, params, 0, steps)
    return optimizer, params


def train_late(optimizer: torch.optim.Optimizer, params: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        train(optimizer, params, [step], without=("vector", "conv") if step < 2 else ())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@crossed
def test_resume_continues_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    whole, whole_params = run_to(case, dtype, STEPS)
    for saved_at in (0, 1, 2, 5):
        first, params = run_to(case, dtype, saved_at)
        file = through_file(first.state_dict())
        params = clone(params)
        second = case.create(params.values(), lr=123.0)
        second.load_state_dict(file)
        assert_same(state_of(second, params), state_of(first, dict(zip(params, first_params(first), strict=True))))
        train_late(second, params, saved_at, STEPS)
        assert_same(values(params), values(whole_params), f"saved at {saved_at}")
        assert_same(state_of(second, params), state_of(whole, whole_params), f"saved at {saved_at}")


def first_params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@crossed
def test_bytes_are_the_same_after_resume(case: Case, dtype: torch.dtype) -> None:
    first, params = run_to(case, dtype, 3)
    before = state_bytes(first)
    params = clone(params)
    second = case.create(params.values())
    second.load_state_dict(through_file(first.state_dict()))
    assert state_bytes(second) == before
    train(second, params, [3])
    train(first, params, [3])
    assert state_bytes(second) == state_bytes(first) == before


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@crossed
def test_state_dtypes_follow_the_design(case: Case, dtype: torch.dtype) -> None:
    """Moments and statistics in fp32 (fp64 beside fp64 parameters) whatever the parameter is, codes in one byte."""
    optimizer, params = run_to(case, dtype, 3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    allowed = {wide, torch.uint8, torch.float64 if dtype == torch.float64 else torch.bfloat16}
    for name, state in state_of(optimizer, params).items():
        assert (state["step"].dtype, state["step"].shape, state["step"].device.type) == (torch.float32, (), "cpu")
        assert state["step"] == (1 if name in ("vector", "conv") else 3)
        for key, value in state.items():
            if key.endswith("_codebook"):
                assert (value.dtype, value.shape) == (torch.float32, (256,)), name
            elif key in ("exp_avg_sq_block_size", "basis_left"):
                assert (value.dtype, value.shape) == (torch.int64, ()), name
            elif isinstance(value, torch.Tensor) and key != "step":
                assert value.dtype in allowed, (name, key, value.dtype)
                if key.endswith("_codes"):
                    assert (value.dtype, value.shape) == (torch.uint8, params[name].shape), name


@crossed
def test_state_holds_flat_plain_values(case: Case) -> None:
    """No strings, tuples, dicts, tensor subclasses or own types; live keys are the saved ones; nothing is shared."""
    optimizer, params = run_to(case, torch.float32, 3)
    assert set(optimizer.state) <= set(params.values())
    saved = optimizer.state_dict()
    assert saved.keys() == {"state", "param_groups"}
    live = {index: optimizer.state[p] for index, p in enumerate(params.values()) if p in optimizer.state}
    assert saved["state"].keys() == live.keys()
    for index, state in saved["state"].items():
        assert state.keys() == live[index].keys()
        for key, value in [*state.items(), *live[index].items()]:
            assert value is None or type(value) in (torch.Tensor, int, float), (key, type(value))
            assert not isinstance(value, torch.Tensor) or not value.requires_grad
    storages = [t.untyped_storage().data_ptr() for t in tensors(optimizer) if t.numel()]
    assert len(storages) == len(set(storages)), "two state tensors share memory"
    for group in saved["param_groups"]:
        for key, value in group.items():
            assert not isinstance(value, torch.Tensor), key
            assert type(value).__module__ == "builtins", (key, type(value))


@crossed
def test_loading_shares_no_memory(case: Case) -> None:
    first, params = run_to(case, torch.float32, 3)
    file = copy.deepcopy(first.state_dict())
    untouched = copy.deepcopy(file)
    runs = []
    for _ in range(2):
        mine = clone(params)
        optimizer = case.create(mine.values())
        optimizer.load_state_dict(file)
        train(optimizer, mine, range(3, 5))
        optimizer.param_groups[0]["lr"] = 7.0
        runs.append(values(mine))
    assert_same(file, untouched, "the loaded dict")
    assert_same(runs[0], runs[1], "two optimizers fed from one dict")


@crossed
def test_saving_is_repeatable(case: Case) -> None:
    """`state_dict` changes nothing, and gives the same again after a load."""
    optimizer, params = run_to(case, torch.bfloat16, 3)
    before = snapshot(optimizer, params)
    first = copy.deepcopy(optimizer.state_dict())
    assert_same(snapshot(optimizer, params), before)
    optimizer.load_state_dict(through_file(first))
    assert_same(optimizer.state_dict(), first, "saved again after a load")


@crossed
def test_saved_shapes_depend_on_shapes_alone(case: Case) -> None:
    """Other data, other structure in it, and other precision of the parameters: the same keys and shapes are saved."""

    def layout(structured: bool) -> dict[Any, Any]:
        params = parameters(torch.float32, {"a": (24, 512), "b": (6, 96, 40), "c": (12, 768)})
        optimizer = case.create(params.values())
        for step in range(2):
            set_gradients(params, step)
            for p in params.values():
                assert p.grad is not None
                if structured and p.shape[-1] % 64 == 0:
                    p.grad *= torch.exp(4 * noise((p.shape[-1] // 64,), "blocks")).repeat_interleave(64).float()
            optimizer.step()
        return {
            (index, key): (tuple(value.shape), value.dtype)
            for index, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    assert layout(False) == layout(True)


READ = """
import sys, torch
for path in sys.argv[1:]:
    saved = torch.load(path, weights_only=True)
    assert saved.keys() == {"state", "param_groups"}, saved.keys()
    for state in saved["state"].values():
        for key, value in state.items():
            assert isinstance(key, str) and (value is None or type(value) in (torch.Tensor, int, float)), key
assert not any(name.split(".")[0] == "daypack" for name in sys.modules)
print("read", len(sys.argv) - 1)
"""


def test_files_load_where_the_library_is_unknown(tmp_path: Path) -> None:
    """All optimizers at once: `weights_only=True` in a process that never imports daypack."""
    paths = []
    for case in CASES:
        optimizer, _ = run_to(case, torch.bfloat16, 2)
        paths.append(str(tmp_path / f"{case}.pt"))
        torch.save(optimizer.state_dict(), paths[-1])
    result = subprocess.run([sys.executable, "-c", READ, *paths], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"read {len(paths)}"


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@crossed
def test_copies_continue_bit_for_bit(case: Case, copied: str) -> None:
    optimizer, params = run_to(case, torch.float32, 3)
    # Parameters travel in the same copy, as when a trainer object is copied.
    pair = (optimizer, list(params.values()))
    other, others = copy.deepcopy(pair) if copied == "deepcopy" else pickle.loads(pickle.dumps(pair))
    twins = dict(zip(params, others, strict=True))
    assert all(a is b for a, b in zip(first_params(other), others, strict=True))
    train(optimizer, params, range(3, 5))
    train(other, twins, range(3, 5))
    assert_same(values(twins), values(params))
    assert_same(state_of(other, twins), state_of(optimizer, params))
    assert type(other) is type(optimizer)
    assert_same(other.defaults, optimizer.defaults)
    assert isinstance(repr(other), str)


@crossed
def test_copy_of_an_unstepped_optimizer_works(case: Case) -> None:
    params = parameters()
    optimizer, twins = copy.deepcopy((case.create(params.values()), params))
    reference = case.create(params.values())
    train(optimizer, twins, range(2))
    train(reference, params, range(2))
    assert_same(values(twins), values(params))


@crossed
def test_loading_empty_state_is_harmless(case: Case) -> None:
    """Launchers load `state_dict()` right back before the first step."""
    params, others = parameters(), parameters()
    optimizer, reference = case.create(params.values()), case.create(others.values())
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict(through_file(optimizer.state_dict()))
    assert not optimizer.state
    train(optimizer, params, range(3))
    train(reference, others, range(3))
    assert_same(values(params), values(others))


@crossed
def test_group_extras_and_learning_rate_survive(case: Case) -> None:
    """A scheduler's own keys and values it set come back; the file wins over the constructor, as in torch."""
    params = parameters()
    optimizer = case.create(params.values())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.param_groups[0]["note"] = [1, 2.5, "x"]
    train(optimizer, params, range(2))
    other = case.create(clone(params).values(), lr=9.0, weight_decay=0.5)
    other.load_state_dict(through_file(optimizer.state_dict()))
    (group,) = other.param_groups
    assert group["initial_lr"] == case.spec.lr
    assert group["lr"] == case.spec.lr * 0.5
    assert group["note"] == [1, 2.5, "x"]
    assert group["weight_decay"] == optimizer.param_groups[0]["weight_decay"]


@crossed
def test_materialized_state_is_never_stepped(case: Case) -> None:
    params = parameters()
    before = values(params)
    optimizer = case.create(params.values())
    daypack.materialize_state(optimizer)
    assert_same(values(params), before)
    assert set(optimizer.state) == set(params.values())
    assert all(state["step"] == 0 for state in optimizer.state.values())
    trained = case.create(clone(params).values())
    trained_params = dict(zip(SHAPES, first_params(trained), strict=True))
    train(trained, trained_params, range(1))
    for p, q in zip(params.values(), first_params(trained), strict=True):
        for key, value in trained.state[q].items():
            mine = optimizer.state[p][key]
            assert type(mine) is type(value), key
            if isinstance(value, torch.Tensor) and "sq_block" not in key:
                assert (mine.shape, mine.dtype) == (value.shape, value.dtype), key


@crossed
def test_materialize_leaves_training_unchanged(case: Case) -> None:
    """Also when it comes in the middle, where some parameters have state already."""
    params, others = parameters(), parameters()
    optimizer, reference = case.create(params.values()), case.create(others.values())
    daypack.materialize_state(optimizer)
    train(optimizer, params, range(2), without=("conv", "vector"))
    daypack.materialize_state(optimizer)
    train(optimizer, params, range(2, 4))
    train(reference, others, range(2), without=("conv", "vector"))
    train(reference, others, range(2, 4))
    assert_same(values(params), values(others))
    assert_same(state_of(optimizer, params), state_of(reference, others))


@crossed
def test_state_put_there_directly_continues(case: Case) -> None:
    """Some sharding wrappers write the saved state into ``optimizer.state`` and never call `load_state_dict`."""
    params = parameters(shapes={"a": (24, 384), "b": (16, 520), "c": (130,)})
    optimizer = case.create(params.values())
    for step in range(4):
        set_gradients(params, step)
        params["a"].grad = structured(24, 384, 48, step).float()
        if step == 2:
            mine = clone(params)
            other = case.create(mine.values())
            saved = copy.deepcopy(optimizer.state_dict()["state"])
            for index, p in enumerate(mine.values()):
                other.state[p] = saved.get(index, {})
        if step >= 2:
            for name, p in mine.items():
                p.grad = params[name].grad
            other.step()
        optimizer.step()
    assert_same(values(mine), values(params))
    before = state_of(optimizer, params)
    assert_same({name: state for name, state in state_of(other, mine).items() if state or name in before}, before)
