"""What differs between two states, one kind of difference at a time, and distances against numpy."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import daypack
from daypack.checkpoint import save_file

from ..conformance.scene import clone, parameters, train
from ..conformance.specs import CASES, Case


def pair(case: Case, steps: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Two optimizers of one state, over parameters of their own."""
    params = parameters(dtype)
    optimizer = case.create(params.items())
    train(optimizer, params, range(steps))
    mine = clone(params)
    other = case.create(mine.items())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer, other, mine


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_states_are_equal_whatever_holds_them(case: Case, tmp_path: Path) -> None:
    one, other, _ = pair(case)
    save_file(one, tmp_path / "a.safetensors")
    found = daypack.diff_states(tmp_path / "a.safetensors", other)
    assert found.equal, str(found)
    assert found.options == []
    for param in found.params:
        for each in param.moments:
            assert each.distance == 0
            assert each.cosine is None or each.cosine == pytest.approx(1)
    assert str(found).startswith(f"equal: {len(found.params)} parameters")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["equal"] is True


@pytest.mark.parametrize("case", [case for case in CASES if case.label != "plain"], ids=str)
def test_a_further_step_is_seen_in_every_parameter(case: Case) -> None:
    one, other, params = pair(case)
    train(other, params, [3])
    found = daypack.diff_states(one, other)
    assert not found.equal
    for param in found.params:
        if 0 in param.shapes[0]:
            continue
        assert not param.identical
        if case.spec.name != "sgd":  # torch does not count its steps
            assert param.steps == (3, 4)
            assert param.changes == ("steps",)
        if case.label != "low" or len(param.shapes[0]) != 2:
            assert all(each.distance > 0 for each in param.moments)
            assert param.moments


def test_distances_and_cosines_are_those_of_numpy() -> None:
    case = next(case for case in CASES if case.spec.name == "adamw")
    one, other, params = pair(case)
    train(other, params, [3, 4])
    found = {param.name: param for param in daypack.diff_states(one, other).params}
    for (name, p), q in zip(params.items(), one.state, strict=True):
        for each in found[name].moments:
            a = one.state[q][each.moment].double().numpy().ravel()
            b = other.state[p][each.moment].double().numpy().ravel()
            if not a.size:
                assert (each.distance, each.cosine) == (0, None)
                continue
            largest = max(np.linalg.norm(a), np.linalg.norm(b))
            assert each.distance == pytest.approx(np.linalg.norm(a - b) / largest, rel=1e-12)
            assert each.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)


def test_formats_and_classes_that_differ_are_compared_as_numbers() -> None:
    one, _, params = pair(next(case for case in CASES if case.spec.name == "adamw"))
    gefen = daypack.convert(one, "gefen")
    found = daypack.diff_states(one, gefen)
    assert found.optimizers == ("AdamW", "Gefen")
    by_name = {param.name: param for param in found.params}
    matrix = by_name["matrix"]
    assert matrix.formats == ("fp32 + fp32", "8-bit learned/256 + factored")
    assert 0 < matrix.moments[0].distance < 0.03
    assert matrix.moments[0].cosine == pytest.approx(1, abs=1e-3)
    assert by_name["vector"].moments[1].distance == 0
    assert {key for key, *_ in found.options} <= {"decoupled_weight_decay", "fused", "rule", "foreach"}
    bias = {name: float(param.moments[0].distance) for name, param in by_name.items()}
    error = {e.param: e.error for e in gefen.conversion.entries if e.moment == "exp_avg"}
    assert bias["matrix"] == pytest.approx(error["matrix"], rel=0.02)
    assert params


def test_options_shapes_and_names_that_differ() -> None:
    shapes = {"same": (8, 16), "grown": (8, 16), "left": (4, 4)}
    params = parameters(shapes=shapes)
    one = daypack.Gefen(params.items(), lr=1e-3)
    train(one, params, range(2))
    params = parameters(shapes={"same": (8, 16), "grown": (8, 32), "right": (4, 4)})
    other = daypack.Gefen(params.items(), lr=2e-3, betas=(0.8, 0.99))
    train(other, params, range(2))
    found = daypack.diff_states(one, other)
    assert found.only == (("left",), ("right",))
    assert found.options == [("lr", 1e-3, 2e-3, 2), ("betas", (0.9, 0.999), (0.8, 0.99), 2)]
    grown = found.params[1]
    assert (grown.shapes, grown.moments, grown.note) == (((8, 16), (8, 32)), (), "other shapes")
    text = str(found)
    for line in ("only in A: left", "only in B: right", "grown: shape (8, 16) -> (8, 32)", "lr: 0.001 -> 0.002"):
        assert line in text


def test_one_bit_is_enough() -> None:
    one, other, params = pair(next(case for case in CASES if str(case) == "gefen-factored"))
    other.state[params["matrix"]]["exp_avg_codes"][3, 3] ^= 1
    found = daypack.diff_states(one, other)
    assert [param.name for param in found.params if not param.equal] == ["matrix"]
    assert 0 < found.params[0].moments[0].distance < 1e-3


def test_nan_is_compared_by_its_bits_and_left_out_of_distances() -> None:
    one, other, params = pair(next(case for case in CASES if case.spec.name == "adamw"))
    for optimizer in (one, other):
        next(iter(optimizer.state.values()))["exp_avg"][0, 0] = float("nan")
    assert daypack.diff_states(one, other).equal
    other.state[params["matrix"]]["exp_avg"][1, 1] += 1
    moment = daypack.diff_states(one, other).params[0].moments[0]
    assert 0 < moment.distance < 2


def test_low_rank_moments_of_other_bases_are_not_compared() -> None:
    one, other, params = pair(next(case for case in CASES if case.label == "low"))
    other.state[params["matrix"]]["basis"].neg_()
    found = daypack.diff_states(one, other).params[0]
    assert found.moments == ()
    assert "bases" in found.note


def test_states_without_names_are_matched_by_order() -> None:
    params = parameters()
    named = daypack.AdamW(params.items())
    train(named, params, range(2))
    mine = parameters()
    bare = daypack.AdamW(mine.values())
    train(bare, mine, range(2))
    found = daypack.diff_states(named, bare)
    assert found.equal
    assert found.notes == ("one state has no names: parameters are matched by their order",)
    assert daypack.diff_states(bare, named).equal
    fewer = daypack.AdamW(list(mine.values())[1:])
    with pytest.raises(ValueError, match="shapes do not agree in their order"):
        daypack.diff_states(named, fewer)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_prefixes_of_wrappers_are_no_difference(prefix: str) -> None:
    params = parameters()
    plain = daypack.AdamW(params.items())
    train(plain, params, range(2))
    wrapped = copy.deepcopy(plain.state_dict())
    for group in wrapped["param_groups"]:
        group["param_names"] = [prefix + name for name in group["param_names"]]
    for found in (daypack.diff_states(plain, wrapped), daypack.diff_states(wrapped, plain)):
        assert found.only == ((), ())
        assert found.equal
        assert [param.name for param in found.params] == [*params]


def test_names_that_only_a_prefix_tells_apart_are_kept_apart() -> None:
    params = parameters(shapes={"a": (4, 4), "module.a": (4, 4)})
    optimizer = daypack.AdamW(params.items())
    train(optimizer, params, range(2))
    found = daypack.diff_states(optimizer, optimizer)
    assert [param.name for param in found.params] == ["a", "module.a"]


def test_state_that_cannot_be_read_is_not_called_equal() -> None:
    state = {"step": torch.tensor(2.0), "exp_avg": torch.eye(4).to_sparse(), "exp_avg_sq": torch.ones(4, 4)}
    packed = {"state": {0: state}, "param_groups": [{"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]}
    found = daypack.diff_states(packed, packed, optimizer="adamw")
    assert not found.equal
    assert "exp_avg cannot be read" in found.params[0].note
