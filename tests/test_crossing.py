"""Every optimizer with everything that reads its state, and two that the package does not know with all of these.

What each moment is a mean of stands here once more, apart from the rules, and with it what conversion must carry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack
from daypack.inspection.page import render_inspection
from daypack.inspection.table import diff_table, inspection_table
from daypack.optim.registry import REGISTRY
from daypack.planner.state import state_bytes
from daypack.presentation import html

from .conformance.scene import noise
from .newcomers import NEWCOMERS

ADAM = {"exp_avg": "g", "exp_avg_sq": "g^2"}
#: What the moments of each optimizer's matrices are means of.
MEANS: dict[str, dict[str, str]] = {
    "sgd": {"exp_avg": "g"},
    "sgd8bit": {"exp_avg": "g"},
    "lion8bit": {"exp_avg": "g"},
    "muon": {"exp_avg": "g"},
    "adafactor": {"exp_avg": "u", "exp_avg_sq": "g^2"},
    "adopt": {"exp_avg": "u / sqrt(v)", "exp_avg_sq": "g^2"},
    "ademamix": {"exp_avg": "g", "exp_avg_slow": "g", "exp_avg_sq": "g^2"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "sgd8bit": {"momentum": 0.9, "min_8bit_size": 64},
    "adafactor": {"beta1": 0.9, "bits": 8},
    "galore": {"inner": "gefen"},
    **{name: {"min_8bit_size": 64} for name in ("adam8bit", "adamw8bit", "lion8bit")},
}
#: torch's own names of moments.
TORCH_KEYS = {"sgd": {"exp_avg": "momentum_buffer"}}
NAMES = [*REGISTRY, *NEWCOMERS]
STEPS, LR = 6, 1e-3
SHAPES = {"matrix": (24, 130), "vector": (30,)}
CARRIED = {"exact", "expanded", "requantised"}

pytestmark = pytest.mark.filterwarnings("ignore:GaLore projects nothing")


@pytest.fixture(autouse=True)
def _newcomers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, cls in NEWCOMERS.items():
        monkeypatch.setitem(REGISTRY, name, cls)
    return


def means_of(name: str, param: str = "matrix") -> dict[str, str]:
    # Muon leaves vectors to the optimizer beside it.
    return ADAM if name == "muon" and param == "vector" else MEANS.get(name, ADAM)


def gradient(name: str, step: int) -> Tensor:
    """A steady part, so that means are far from 0, and noise."""
    return (noise(SHAPES[name], name, "steady") + 0.3 * noise(SHAPES[name], name, step)).float()


def step(optimizer: Any, params: dict[str, Parameter], at: int) -> None:
    for name, p in params.items():
        p.grad = gradient(name, at)
    optimizer.step()


def trained(name: str) -> tuple[Any, dict[str, Parameter]]:
    params = {key: Parameter(noise(shape, key).float()) for key, shape in SHAPES.items()}
    optimizer = daypack.create(name, params.items(), lr=LR, **OPTIONS.get(name, {}))
    for at in range(STEPS):
        step(optimizer, params, at)
    return optimizer, params


def test_every_registered_optimizer_is_here() -> None:
    assert set(MEANS) | set(OPTIONS) <= set(NAMES)
    assert len(NAMES) >= 17


def test_the_newcomer_rule_is_torchs() -> None:
    p, q = (Parameter(noise((24, 40), "p").double()) for _ in range(2))
    ours = daypack.create("radam", [p], lr=1e-2, bits=32, second_moment="dense", weight_decay=0.1)
    theirs = torch.optim.RAdam([q], lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True)
    for at in range(30):
        p.grad = q.grad = noise((24, 40), at)
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_inspect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (
        name not in NEWCOMERS
    ):  # Pages of the others are drawn in tests/inspection/test_page.py; drawing is what takes long.
        monkeypatch.setattr(html, "to_svg", lambda figure: b"<?xml")
    optimizer, params = trained(name)
    found = daypack.inspect_state(optimizer, pictures=True)
    assert found.optimizer == type(optimizer).__name__
    for each in found.params:
        assert each.step == (None if name == "sgd" else STEPS)
        assert not each.faults
        assert not each.nonfinite
        assert [moment.moment for moment in each.moments] == [*means_of(name, each.name)]
        assert sum(each.components.values()) == sum(
            v.nbytes if isinstance(v, Tensor) else 8 for v in optimizer.state[params[each.name]].values()
        )
        for moment in each.moments:
            assert moment.norm > 0, moment
            assert math.isfinite(moment.largest), moment
            assert moment.elements == params[each.name].numel()
            coded = "bit" in moment.format
            assert (moment.error or 0) < (0.3 if moment.format.startswith("4") else 0.05), moment
            assert coded == (moment.saturated is not None), moment
        assert (each.update is None) == bool(each.note), each
        assert each.update is None or 0 < each.update < 100
    assert name in ("lamb", "adafactor") or all(each.update for each in found.params)
    _shown(found, name)


def _shown(found: Any, name: str) -> None:
    """Table, JSON and page have every moment."""
    table, _ = inspection_table(found.params, lambda _: True)
    titles = {str(column.header) for column in table.columns}
    symbols = {moment.symbol for each in found.params for moment in each.moments}
    assert {f"|{symbol}|" for symbol in symbols} <= titles
    assert json.loads(json.dumps(found.to_dict()))["optimizer"] == found.optimizer
    page = render_inspection(found)
    matrices = (moment for each in found.params for moment in each.moments if moment.rows > 1)  # those have maps
    assert all(moment.title in page for moment in matrices), name


@pytest.mark.parametrize("name", NAMES)
def test_diff(name: str) -> None:
    (optimizer, _), (other, params) = trained(name), trained(name)
    assert daypack.diff_states(optimizer, other).equal
    step(other, params, STEPS)
    found = daypack.diff_states(optimizer, other)
    assert not found.equal
    assert len(diff_table(found).columns) == 3 + 2 * len(means_of(name) | means_of(name, "vector"))
    for each in found.params:
        assert not each.identical, each
        assert not each.note, each
        assert [moment.moment for moment in each.moments] == [*means_of(name, each.name)]
        assert all(0 < moment.distance < 1.5 for moment in each.moments), each
        assert name == "sgd" or each.steps == (STEPS, STEPS + 1)


@pytest.mark.parametrize("name", NAMES)
def test_monitor_plan_and_report_count_the_same_bytes(name: str) -> None:
    optimizer, params = trained(name)
    with daypack.monitor(optimizer, interval=1) as monitor:
        step(optimizer, params, STEPS)
    (reading,) = monitor.readings
    values = {tag.removeprefix("optimizer/"): value for tag, value in reading.values.items()}
    report = daypack.state_report(optimizer)
    held = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    assert values["state_bytes"] == report.total_bytes == held
    assert held == state_bytes(name, [*params.items()], options=OPTIONS.get(name, {}))
    assert [entry.name for entry in report.entries] == [*params]
    assert reading.step == (1 if name == "sgd" else STEPS + 1)  # which counts no steps: those that were seen
    assert 0 < values["update_rms"] < 1
    assert values["nonfinite"] == 0
    coded = [m.moment for m in daypack.inspect_state(optimizer).params[0].moments if "bit" in m.format]
    for moment in coded:
        assert 0 < values[f"{moment}/saturated"] < 0.5
        assert 0 <= values[f"{moment}/zero"] < 0.5
    followed = [m for m in coded if means_of(name)[m] == "g"]
    assert all(abs(values[f"{moment}/radial_bias"]) < 0.05 for moment in followed)


@pytest.mark.parametrize("other", NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_convert(name: str, other: str) -> None:
    """Each moment of the target is carried, or the report says truly why not."""
    optimizer, params = trained(name)
    new = daypack.convert(optimizer, other, **OPTIONS.get(other, {}))
    report = {(entry.param, entry.moment): entry for entry in new.conversion.entries}  # type: ignore[attr-defined]
    for param, p in params.items():
        ours, theirs = means_of(name, param), means_of(other, param)
        lacking = theirs.get("exp_avg_sq") and ours.get("exp_avg_sq") != theirs["exp_avg_sq"]
        if lacking:  # nothing to divide by: the parameter starts anew, and says so
            entry = report[param, "state"]
            assert entry.outcome == "dropped", entry
            assert "no second moment" in entry.note, entry
            assert all(float(v.sum()) == 0 for v in new.state[p].values() if isinstance(v, Tensor)) or not new.state[p]
            continue
        for moment, mean in theirs.items():
            entry = report[param, moment]
            if ours.get(moment) == mean:
                assert entry.outcome in CARRIED, entry
                # Row and column means are a rank-1 estimate of a second moment; codes err by half a level.
                assert entry.error < (1.0 if mean == "g^2" else 0.3 if "gefen4" in (name, other) else 0.03), entry
                assert not entry.note, entry
                _same_mean(optimizer, new, name, other, param, p, moment)
            else:
                assert entry.outcome == "new", entry
                assert moment in entry.note, entry
                assert "keeps no" in entry.note or "mean of" in entry.note, entry
        for moment in ours.keys() - theirs.keys():
            assert report[param, moment].outcome == "dropped", report
    step(new, params, STEPS)
    assert all(p.isfinite().all() for p in params.values())


def _same_mean(old: Any, new: Any, name: str, other: str, param: str, p: Parameter, moment: str) -> None:
    """The unbiased mean that a moment stands for, read by converting to AdamW where AdamW has that moment."""
    if moment not in ADAM or ({"adafactor", "adopt"} & {name, other} and moment == "exp_avg"):
        return
    # torch's SGD does not count its steps: they are taken for many, also by what it is converted to.
    at = 10_000 if name == "sgd" else STEPS
    one, two = (_stored(optimizer, kind, p, moment, at) for optimizer, kind in ((old, name), (new, other)))
    if one is None or two is None:
        return
    assert (one - two).norm() < (0.3 if moment == "exp_avg" else 1.0) * one.norm(), (name, other, moment)


def _stored(optimizer: Any, name: str, p: Parameter, moment: str, at: int) -> Tensor | None:
    """A dense moment over its bias, as the papers have it; None if it is not stored densely."""
    key = TORCH_KEYS.get(name, {}).get(moment, moment)
    value = optimizer.state[p].get(key)
    group = optimizer.param_groups[0]
    if not isinstance(value, Tensor) or value.shape != p.shape:
        return None
    if name in ("sgd", "sgd8bit"):  # a sum of decayed gradients
        return value * (1 - 0.9) / (1 - 0.9**at)
    decays = {"lion8bit": 1} if moment == "exp_avg" else {}
    if name in ("adafactor", "adopt"):
        return value
    if name == "muon" and "betas" not in group:
        return (
            value / (1 - (0.9 if p.dim() < 2 else group["momentum"]) ** at)
            if moment == "exp_avg"
            else value / (1 - 0.999**at)
        )
    return value / (1 - float(group["betas"][decays.get(name, 0 if moment == "exp_avg" else 1)]) ** at)
