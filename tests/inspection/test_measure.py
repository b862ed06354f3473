"""What is measured in the state of every optimizer, against the live optimizer and independent arithmetic."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import daypack
from daypack.checkpoint import save_file
from daypack.geometry import geometry
from daypack.inspection.codes import expected_errors

from ..conformance.scene import (
    assert_same,
    clone,
    gradient,
    noise,
    parameters,
    set_gradients,
    state_of,
    train,
    values,
)
from ..conformance.specs import CASES, Case
from .twins import first_norm, second_norm

DTYPES = (torch.float32, torch.bfloat16)
CROSSED = [(case, dtype) for case in CASES for dtype in DTYPES]
CODEBOOKS = {"adamw8bit": "dynamic", "adam8bit": "dynamic", "sgd8bit": "dynamic", "lion8bit": "dynamic"}


def trained(case: Case, dtype: torch.dtype, steps: int = 3, **options: Any) -> tuple[Any, Any]:
    params = parameters(dtype)
    optimizer = case.create(params.items(), **options)
    train(optimizer, params, range(steps))
    return optimizer, params


@pytest.mark.parametrize(("case", "dtype"), CROSSED, ids=str)
def test_bytes_are_those_of_the_live_state(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    """Live, from a file of ours and from one of torch: every component of every parameter, as `state_report` has it."""
    optimizer, _ = trained(case, dtype)
    report = {entry.name: entry.components for entry in daypack.state_report(optimizer).entries}
    save_file(optimizer, tmp_path / "state.safetensors")
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    sources = [optimizer, tmp_path / "state.safetensors"]
    if case.label not in ("plain", "low"):  # without state, and of low rank, a bare dict tells no shapes
        sources.append(tmp_path / "state.pt")
    for source in sources:
        found = daypack.inspect_state(source)
        assert {param.name: dict(param.components) for param in found.params} == report
        assert found.total.bytes == sum(found.components.values()) == daypack.state_report(optimizer).total_bytes
        assert found.total.bytes == sum(total.bytes for total in found.by_role.values())
        assert found.total.bytes == sum(total.bytes for total in found.by_format.values())
        # What ADOPT averages is clipped: after few steps many elements share the largest value.
        expected = {"saturated"} if case.spec.name == "adopt" else set()
        assert {warning.kind for warning in found.warnings} <= expected, found.warnings
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["total"]["bytes"] == found.total.bytes


@pytest.mark.parametrize(("case", "dtype"), CROSSED, ids=str)
def test_norms_are_those_of_the_stored_tensors(case: Case, dtype: torch.dtype) -> None:
    optimizer, params = trained(case, dtype)
    found = {param.name: param for param in daypack.inspect_state(optimizer).params}
    kind = CODEBOOKS.get(case.spec.name, "learned")
    signed, unsigned = (kind, kind) if kind == "learned" else (f"signed {kind}", f"unsigned {kind}")
    for name, p in params.items():
        state, stats = optimizer.state.get(p, {}), found[name]
        assert stats.step == (int(state["step"]) if "step" in state else None)
        kept = {each.moment for each in stats.moments}
        names = ("exp_avg", "exp_avg_slow", "exp_avg_sq")
        assert kept == {m for m in names if any(_of(key, m) for key in state)}, name
        for each in stats.moments:
            if not each.squares:
                slow = each.moment == "exp_avg_slow"
                wanted = first_norm(_under_the_usual_name(state) if slow else state, signed)
            else:
                view = geometry(tuple(p.shape))
                wanted = second_norm(state, each.elements, view.matrices * view.rows, unsigned)
            assert each.norm == pytest.approx(wanted, rel=1e-5, abs=1e-30), (name, each)
            assert each.nonfinite == 0


def _of(key: str, moment: str) -> bool:
    """Whether a state key is of a moment."""
    if moment == "exp_avg":
        others = ("exp_avg_sq", "exp_avg_slow")
        return (key.startswith("exp_avg") and not key.startswith(others)) or key == "momentum_buffer"
    return key.startswith(moment)


def _under_the_usual_name(state: dict[str, Any]) -> dict[str, Any]:
    return {"exp_avg" + k.removeprefix("exp_avg_slow"): v for k, v in state.items() if k.startswith("exp_avg_slow")}


@pytest.mark.parametrize("case", [case for case in CASES if case.label != "plain"], ids=str)
def test_the_update_is_the_last_one_that_was_made(case: Case) -> None:
    """Seen from outside: how far the weights went at the last step, over the learning rate. Codes round it by 1 %."""
    options = {} if case.spec.name in ("sgd", "sgd8bit") else {"weight_decay": 0.0}
    optimizer, params = trained(case, torch.float64, **options)
    before = {name: p.detach().clone() for name, p in params.items()}
    set_gradients(params, 3)
    optimizer.step()
    lr = case.spec.lr
    found = {param.name: param for param in daypack.inspect_state(optimizer).params}
    for name, p in params.items():
        stats = found[name]
        if not p.numel() or (case.spec.name == "adafactor" and case.label == ""):
            assert stats.update is None
            assert stats.ratio is None
            continue
        moved = float((p.detach() - before[name]).square().mean().sqrt())
        coded = "8-bit" in stats.format or "mean" in stats.format
        exact = not coded and case.spec.name not in ("lamb", "adafactor")  # those depend on the weights before the step
        assert stats.update is not None, (name, stats.note)
        # Muon's last step looked ahead by its last gradient; what is told is the update that the momentum stands for.
        near = 0.25 if case.spec.name == "muon" else 1e-6 if exact else 0.03
        assert lr * stats.update == pytest.approx(moved, rel=near), (name, stats.format)
        assert stats.weight == pytest.approx(float(p.detach().square().mean().sqrt()), rel=1e-9)
        assert stats.ratio == pytest.approx(lr * stats.update / stats.weight)


def test_without_weights_the_update_stands_alone(tmp_path: Path) -> None:
    params = parameters()
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(2))
    save_file(optimizer, tmp_path / "state.safetensors")
    bare = daypack.inspect_state(tmp_path / "state.safetensors")
    assert not bare.weights
    assert any("weights are not known" in note for note in bare.notes)
    torch.save({name: p.detach() for name, p in params.items()}, tmp_path / "model.pt")
    given = daypack.inspect_state(tmp_path / "state.safetensors", tmp_path / "model.pt")
    for one, other in zip(bare.params, given.params, strict=True):
        assert one.ratio is None
        assert one.update == other.update
        assert (other.ratio is None) == (other.elements == 0)
    lamb = daypack.LAMB(params.items())
    train(lamb, params, range(2))
    save_file(lamb, tmp_path / "lamb.safetensors")
    assert all(p.update is None for p in daypack.inspect_state(tmp_path / "lamb.safetensors").params)
    assert any("depends on the weights" in note for note in daypack.inspect_state(tmp_path / "lamb.safetensors").notes)


@pytest.mark.parametrize("name", ["gefen", "adamw8bit"])
@pytest.mark.parametrize("tails", [1, 3])
def test_the_expected_error_is_the_one_that_storing_makes(name: str, tails: int) -> None:
    """One step from 0: what is stored, against ``(1 - b) g`` and ``(1 - b) g^2``. Within a tenth of the expectation."""
    p = torch.nn.Parameter(torch.zeros(256, 512))
    optimizer = daypack.create(name, [("p", p)])
    g = noise((256, 512), "g").float()
    p.grad = g.sign() * g.abs() ** tails
    optimizer.step()
    (param,) = daypack.inspect_state(optimizer).params
    plain = daypack.convert(optimizer, "adamw", betas=optimizer.param_groups[0]["betas"]).state[p]
    wanted = {"exp_avg": 0.1 * p.grad, "exp_avg_sq": 0.001 * p.grad.square()}
    for each in param.moments:
        if each.error is not None:
            real = (plain[each.moment] - wanted[each.moment]).double().norm() / wanted[each.moment].double().norm()
            assert each.error == pytest.approx(float(real), rel=0.1), each.moment
            assert each.error > 1e-3
    assert param.error == max(each.error for each in param.moments if each.error is not None)


def test_expected_errors_of_even_levels_are_those_of_the_textbook() -> None:
    """Rounding to the nearest of levels at distance d: d^2 / 12; up or down by chance: d^2 / 6."""
    levels = torch.linspace(-1, 1, 256)
    d = 2 / 255
    torch.testing.assert_close(
        expected_errors(levels, False), torch.full((256,), d * d / 12).double(), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(expected_errors(levels, True), torch.full((256,), d * d / 6).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_expected_error_of_half_precision(dtype: torch.dtype) -> None:
    x = noise((200, 300), "x").exp() * 1e-2
    state = {"step": torch.tensor(3.0), "exp_avg": x.to(dtype), "exp_avg_sq": x.square().float()}
    packed = {"state": {0: state}, "param_groups": [{"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]}
    (param,) = daypack.inspect_state(packed, optimizer="adamw").params
    first, second = param.moments
    assert first.error == pytest.approx(float((x.to(dtype).double() - x).norm() / x.norm()), rel=0.05)
    assert second.error == 0
    assert param.format == f"{'bf16' if dtype == torch.bfloat16 else 'fp16'} + fp32"


def test_only_what_matches_is_measured() -> None:
    params = parameters()
    optimizer = daypack.AdamW(params.items())
    train(optimizer, params, range(1))
    found = daypack.inspect_state(optimizer, match=["m*", "vec*"])
    assert [param.name for param in found.params] == ["matrix", "vector"]
    assert found.of == len(params)
    with pytest.raises(ValueError, match=r"no parameter matches nothing\*; there are matrix"):
        daypack.inspect_state(optimizer, match=["nothing*"])


def test_parameters_that_were_never_stepped() -> None:
    params = parameters()
    optimizer = daypack.Gefen(params.items())
    assert "10 parameters have no state" in " ".join(daypack.inspect_state(optimizer).notes)
    daypack.materialize_state(optimizer)
    found = daypack.inspect_state(optimizer)
    assert {param.step for param in found.params} == {0}
    assert found.warnings == ()
    set_gradients(params, 0, without=["matrix"])
    optimizer.step()
    assert any("between 0 and 1 steps" in note for note in daypack.inspect_state(optimizer).notes)


def test_roles_of_a_transformer() -> None:
    from daypack.lab import build_model

    model = build_model("tiny", 0)
    optimizer = daypack.Gefen(daypack.param_groups(model))
    daypack.materialize_state(optimizer)
    roles = {param.name: param.role for param in daypack.inspect_state(optimizer).params}
    assert roles["embedding.weight"] == "embedding"
    assert roles["head.weight"] == "output"
    assert roles["blocks.0.attention.q_proj.weight"] == "attention"
    assert roles["blocks.1.mlp.down_proj.weight"] == "feed-forward"
    assert {roles["norm.weight"], roles["blocks.0.mlp_norm.weight"]} == {"norm"}


def test_looking_changes_nothing() -> None:
    """Inspecting reads only: state, weights and the next step are those of an optimizer that nobody looked at."""
    for case in CASES:
        optimizer, params = trained(case, torch.float32)
        mine = clone(params)
        other = case.create(mine.items())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = state_of(optimizer, params)
        daypack.inspect_state(optimizer, pictures=True)
        assert_same(state_of(optimizer, params), before)
        train(optimizer, params, [3])
        train(other, mine, [3])
        assert_same(values(params), values(mine))


def test_pictures_add_up() -> None:
    """Histograms count every element that is not 0, code counts every code; maps average what they show."""
    p = torch.nn.Parameter(torch.zeros(300, 700))
    optimizer = daypack.AdamW8bit([("layer.weight", p)])
    p.grad = gradient("g", (300, 700), 0).float()
    p.grad[7] = 0
    optimizer.step()
    (param,) = daypack.inspect_state(optimizer, pictures=True).params
    plain = daypack.convert(optimizer, "adamw").state[p]
    for each, wanted in zip(param.moments, (plain["exp_avg"].abs(), plain["exp_avg_sq"].sqrt()), strict=True):
        picture = each.picture
        assert picture is not None
        assert picture.grid is not None
        assert picture.scales is not None
        assert picture.codes is not None
        assert int(picture.histogram.sum()) == int((wanted != 0).sum())
        assert int(picture.codes.sum()) == 300 * 700
        assert float(picture.grid.mean()) == pytest.approx(float(wanted.double().mean()), rel=0.05)
        assert picture.grid.shape == (96, 160)
        assert picture.scales.shape == (96, 3)
        # Element i of 300 rows lies in cell 96 i // 300, element j of 700 columns in 160 j // 700.
        assert float(picture.grid[0, 0]) == pytest.approx(float(wanted[:4, :5].double().mean()), rel=1e-6)
        assert float(picture.grid[-1, -1]) == pytest.approx(float(wanted[-3:, -4:].double().mean()), rel=1e-6)
        assert each.zero_rows == 1
