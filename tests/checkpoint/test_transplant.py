"""State in a changed architecture: what was there goes on exactly, what is new moves sanely."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import daypack
from daypack.checkpoint.changed_model import grow, renamed
from daypack.checkpoint.conversion import HISTORY

from ..conformance.scene import assert_same, clone, gradient, noise, parameters, snapshot, state_of, train
from ..conformance.specs import CASES, Case

OLD = {"a.weight": (24, 520), "b.weight": (40, 64), "c": (130,), "conv": (8, 8, 3, 3), "gone": (4, 4)}
NEW = {"a.weight": (32, 700), "b.weight": (40, 64), "c": (150,), "conv": (12, 10, 3, 3), "more": (16, 40)}
CORNER = {
    name: tuple(slice(0, min(a, b)) for a, b in zip(OLD[name], NEW[name], strict=True)) for name in OLD if name in NEW
}
moments = pytest.mark.parametrize("case", [case for case in CASES if case.label != "plain"], ids=str)


def trained(case: Case, steps: int = 40) -> tuple[Any, Any]:
    params = parameters(shapes=OLD)
    optimizer = case.create(params.items())
    train(optimizer, params, range(steps))
    return optimizer, params


def widened(name: str, step: int) -> torch.Tensor:
    """A gradient of the new shape with that of the old one in its corner."""
    result = gradient(name, NEW[name], step, seed=9).float()
    if name in CORNER:
        result[CORNER[name]] = gradient(name, OLD[name], step).float()[CORNER[name]]
    return result


def corner(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.detach()[CORNER[name]]


@pytest.mark.parametrize("case", [c for c in CASES if c.label not in ("plain", "low")], ids=str)
def test_kept_elements_go_on_and_new_ones_are_sane(case: Case) -> None:
    optimizer, params = trained(case)
    mine = parameters(shapes=NEW)
    with torch.no_grad():
        for name in CORNER:
            mine[name][CORNER[name]] = params[name]
    new = case.create(mine.items())
    report = daypack.transplant(optimizer, new)
    outcomes = {entry.param: entry.outcome for entry in report.entries}
    assert outcomes == {
        **dict.fromkeys(("a.weight", "c", "conv"), "grown"),
        "b.weight": "exact",
        "more": "new",
        "gone": "dropped",
    }
    assert_same(new.state[mine["b.weight"]], optimizer.state[params["b.weight"]])
    divides = any("exp_avg_sq" in key for key in new.state[mine["a.weight"]])
    if "step" in new.state[mine["a.weight"]]:
        assert new.state[mine["a.weight"]]["step"] == (HISTORY if divides else 40)
    before = {name: p.detach().clone() for name, p in mine.items()}
    twin = clone(mine)
    untouched = case.create(twin.items())
    for step in range(40, 44):
        for params_of, each in ((mine, new), (twin, untouched)):
            for name, p in params_of.items():
                p.grad = widened(name, step)
            each.step()
        adaptive = case.spec.namesake in (torch.optim.AdamW, torch.optim.Adam) and case.spec.name != "lamb"
        if step == 40 and adaptive:
            for name in ("a.weight", "c", "conv"):
                fresh = torch.ones(NEW[name], dtype=torch.bool)
                fresh[CORNER[name]] = False
                moved, theirs = ((each[name].detach() - before[name])[fresh].abs() for each in (mine, twin))
                assert 0.3 * theirs.median() < moved.median() < 0.8 * theirs.median(), name
                assert moved.quantile(0.99) < theirs.quantile(0.99), name
    if divides or "step" in new.state[mine["more"]]:
        assert new.state[mine["more"]]["step"] == 4
    assert all(p.isfinite().all() for p in mine.values())


@pytest.mark.parametrize("name", ["adamw", "adam", "lamb", "sgd"])
def test_what_the_moments_of_kept_elements_stand_for_stays(name: str) -> None:
    """An optimizer stepped `HISTORY` times on the same means of g and of g^2 is the one to be continued."""
    params = parameters(shapes=OLD)
    options = {"lr": 1e-3, **({"momentum": 0.9} if name == "sgd" else {})}
    optimizer = daypack.create(name, params.items(), **options)
    train(optimizer, params, range(40))
    mine = parameters(shapes=NEW)
    with torch.no_grad():
        for key in CORNER:
            mine[key][CORNER[key]] = params[key]
    new = daypack.create(name, mine.items(), **options)
    daypack.transplant(optimizer, new)
    for key in ("a.weight", "c", "conv"):
        ours, old = new.state[mine[key]], optimizer.state[params[key]]
        for moment, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
            if name == "sgd":
                continue
            factor = (1 - beta**HISTORY) / (1 - beta**40)
            grown = ours[moment].clone()
            torch.testing.assert_close(corner(key, grown), corner_of_old(key, old[moment]) * factor)
            grown[CORNER[key]] = 0
            assert not grown.any()
        if name == "sgd":
            assert_same(corner(key, ours["momentum_buffer"]), corner_of_old(key, old["momentum_buffer"]))
    if name not in ("adamw", "adam"):
        return
    # One more step, by hand.
    for key, p in mine.items():
        p.grad = widened(key, 40)
    before = mine["a.weight"].detach().clone()
    m = torch.zeros(NEW["a.weight"]).double()
    v = m.clone()
    state, at = optimizer.state[params["a.weight"]], CORNER["a.weight"]
    m[at] = corner_of_old("a.weight", state["exp_avg"]).double() / (1 - 0.9**40)
    v[at] = corner_of_old("a.weight", state["exp_avg_sq"]).double() / (1 - 0.999**40)
    g = mine["a.weight"].grad.double()
    m = (0.9 * (1 - 0.9**10) * m + 0.1 * g) / (1 - 0.9**11)
    v = (0.999 * (1 - 0.999**10) * v + 0.001 * g * g) / (1 - 0.999**11)
    decay = 1 - 1e-3 * optimizer.defaults["weight_decay"]
    new.step()
    torch.testing.assert_close(
        mine["a.weight"].detach().double(), decay * before - 1e-3 * m / (v.sqrt() + 1e-8), rtol=1e-5, atol=1e-7
    )


def corner_of_old(name: str, x: torch.Tensor) -> torch.Tensor:
    return x.detach()[tuple(slice(0, stop.stop) for stop in CORNER[name])]


def test_factored_estimates_of_the_kept_part_stay() -> None:
    """Row and column means thin out alike, so their product over the mean does not change."""
    params = parameters(shapes={"w": (24, 520)})
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(40))
    mine = parameters(shapes={"w": (32, 700)})
    new = daypack.Gefen(mine.items())
    daypack.transplant(optimizer, new)

    def estimate(state: dict[str, torch.Tensor], step: int) -> torch.Tensor:
        row, col = state["exp_avg_sq_row"].double().view(-1, 1), state["exp_avg_sq_col"].double().view(1, -1)
        return row * col / col.mean() / (1 - 0.999**step)

    was, now = estimate(optimizer.state[params["w"]], 40), estimate(new.state[mine["w"]], HISTORY)
    torch.testing.assert_close(now[:24, :520], was, rtol=1e-5, atol=0)
    assert not now[24:].any()
    assert not now[:, 520:].any()


def test_a_smaller_shape_goes_on_exactly() -> None:
    params = parameters(shapes={"w": (24, 520)})
    old = daypack.AdamW(params.items(), lr=1e-3)
    train(old, params, range(40))
    mine = {"w": torch.nn.Parameter(params["w"].detach()[:12, :64].clone())}
    new = daypack.AdamW(mine.items(), lr=1e-3)
    daypack.transplant(old, new)
    assert new.state[mine["w"]]["step"] == 40
    assert_same(new.state[mine["w"]]["exp_avg_sq"], old.state[params["w"]]["exp_avg_sq"][:12, :64].contiguous())
    g = gradient("w", (24, 520), 41).float()
    params["w"].grad, mine["w"].grad = g, g[:12, :64].contiguous()
    old.step()
    new.step()
    assert_same(mine["w"].detach(), params["w"].detach()[:12, :64].contiguous())


def train_on(optimizer: Any, params: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        for name, p in params.items():
            p.grad = widened(name, step)
        optimizer.step()


def test_growing_keeps_the_leading_corner() -> None:
    x = noise((24, 40), "x")
    grown = grow(x, (30, 64))
    assert_same(grown[:24, :40].contiguous(), x)
    assert float(grown.abs().sum()) == pytest.approx(float(x.abs().sum()), rel=1e-5)
    assert_same(grow(x, (10, 64))[:, :40].contiguous(), x[:10].contiguous())
    assert_same(grow(x, (12, 20)), x[:12, :20].contiguous())


def test_heads_keep_the_corner_of_each_head() -> None:
    x = torch.arange(24.0).view(12, 2)
    grown = grow(x, (24, 2), heads=(0, 3, 4))  # heads of 4 rows become heads of 6
    for head in range(3):
        assert_same(grown[6 * head : 6 * head + 4], x[4 * head : 4 * head + 4])
        assert not grown[6 * head + 4 : 6 * head + 6].any()
    assert not grown[18:].any()
    with pytest.raises(ValueError, match="not divided into 5"):
        grow(x, (24, 2), heads=(0, 5, 4))
    shapes = {"q.weight": (16, 64)}
    params = parameters(shapes=shapes)
    old = daypack.AdamW(params.items())
    train(old, params, range(3))
    mine = parameters(shapes={"q.weight": (24, 64)})
    new = daypack.AdamW(mine.items())
    daypack.transplant(old, new, heads={"*.weight": (0, 2, 2)})
    m, before = new.state[mine["q.weight"]]["exp_avg"], old.state[params["q.weight"]]["exp_avg"]
    assert_same(m[12:20], before[8:16])


@pytest.mark.parametrize("name", ["adamw", "gefen"])
def test_what_is_cut_is_said(name: str) -> None:
    params = parameters(shapes={"less": (24, 64), "both": (24, 64), "same": (24, 64)})
    old = daypack.create(name, params.items())
    train(old, params, range(20))
    mine = parameters(shapes={"less": (16, 64), "both": (16, 96), "same": (24, 64)})
    new = daypack.create(name, mine.items())
    report = daypack.transplant(old, new)
    outcomes = {entry.param: (entry.outcome, "were dropped" in entry.note) for entry in report.entries}
    assert outcomes == {"less": ("cut", True), "both": ("grown", True), "same": ("exact", False)}
    assert "parameters cut" in str(report)
    assert new.state[mine["less"]]["step"] == 20
    if name == "adamw":
        assert_same(new.state[mine["less"]]["exp_avg"], old.state[params["less"]]["exp_avg"][:16].clone())


def test_renaming_by_patterns() -> None:
    rules = {"layers.*.attn.*": "blocks.*.attention.*", "layers.*": "blocks.*", "head": "output"}
    assert renamed("layers.3.attn.q.weight", rules) == "blocks.3.attention.q.weight"
    assert renamed("layers.3.mlp.weight", rules) == "blocks.3.mlp.weight"
    assert renamed("head", rules) == "output"
    assert renamed("norm.weight", rules) == "norm.weight"
    with pytest.raises(ValueError, match="more stars"):
        renamed("a.b", {"a.*": "*.*"})
    params = parameters(shapes={"layers.0.w": (8, 64), "layers.1.w": (8, 64)})
    old = daypack.Gefen(params.items())
    train(old, params, range(2))
    mine = parameters(shapes={"blocks.1.w": (8, 64), "blocks.0.w": (8, 64), "blocks.2.w": (8, 64)})
    new = daypack.Gefen(mine.items())
    report = daypack.transplant(old.state_dict(), new, rename={"layers.*": "blocks.*"})
    assert_same(new.state[mine["blocks.1.w"]], old.state[params["layers.1.w"]])
    assert new.state[mine["blocks.2.w"]]["step"] == 0
    assert report.counts() == {"exact": 4, "new": 1}
    with pytest.raises(ValueError, match="the same name"):
        daypack.transplant(old, daypack.Gefen(clone(mine).items()), rename={"layers.*": "one"})


@moments
def test_another_optimizer_on_the_way(case: Case) -> None:
    optimizer, _ = trained(case, 3)
    for name in ("adamw", "gefen"):
        mine = parameters(shapes=NEW)
        new = daypack.create(name, mine.items(), lr=1e-3)
        report = daypack.transplant(optimizer, new)
        assert ("no second moment" in str(report)) == (case.spec.name in ("sgd", "sgd8bit", "lion8bit"))
        train_on(new, mine, 3, 5)
        assert all(p.isfinite().all() for p in mine.values())


def test_refusals_change_nothing() -> None:
    optimizer, params = trained(next(case for case in CASES if case.spec.name == "adamw"), 2)
    unnamed = daypack.AdamW(list(clone(params).values()))
    with pytest.raises(ValueError, match="new optimizer has no parameter names"):
        daypack.transplant(optimizer, unnamed)
    mine = clone(params)
    stepped = daypack.AdamW(mine.items())
    train(stepped, mine, [0])
    before = snapshot(stepped, mine)
    with pytest.raises(ValueError, match="has state already"):
        daypack.transplant(optimizer, stepped)
    assert_same(snapshot(stepped, mine), before)
    fresh = daypack.Gefen(parameters(shapes=NEW).items())
    with pytest.raises(ValueError, match="not divided"):
        daypack.transplant(optimizer, fresh, heads={"a.weight": (0, 7, 8)})
    for wrong in ({"rename": {"b.wieght": "c"}}, {"heads": {"*.wieght": (0, 4, 8)}}):
        with pytest.raises(ValueError, match=r"wieght' matches no parameter; names like it are .*weight"):
            daypack.transplant(optimizer, fresh, **wrong)
    assert not fresh.state
    assert state_of(optimizer, params).keys() == OLD.keys()
