"""State in a changed architecture: what was there goes on exactly, what is new moves sanely."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import daypack
from daypack.checkpoint.growth import grow, renamed

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
    if case.label == "factored":
        ours, old = new.state[mine["a.weight"]], optimizer.state[params["a.weight"]]
        torch.testing.assert_close(ours["exp_avg_sq_row"][:24], old["exp_avg_sq_row"], rtol=1e-5, atol=0)
        torch.testing.assert_close(ours["exp_avg_sq_col"][:520], old["exp_avg_sq_col"], rtol=1e-5, atol=0)
    before = {name: p.detach().clone() for name, p in mine.items()}
    for name, p in mine.items():
        p.grad = widened(name, 40)
    train(optimizer, params, [40])
    new.step()
    lr = case.spec.lr
    exact = case.spec.name in ("adamw", "adam", "sgd")
    for name in CORNER:
        theirs = params[name].detach()
        if exact:
            assert_same(corner(name, mine[name]), theirs, name)
        elif case.label == "factored" and len(OLD[name]) == 2:  # v of kept elements moves only with the new gradients
            moved = (corner(name, mine[name]) - before[name][CORNER[name]]).norm()
            assert (corner(name, mine[name]) - theirs).norm() < 0.3 * moved
    if case.spec.namesake not in (torch.optim.AdamW, torch.optim.Adam):
        return
    bound = 0.1 / 0.001**0.5
    for name in ("a.weight", "c", "conv"):
        fresh = torch.ones(NEW[name], dtype=torch.bool)
        fresh[CORNER[name]] = False
        step = (mine[name].detach() - before[name]) / lr
        moved = step[fresh].abs()
        assert moved.quantile(0.99) <= bound, name
        assert moved.max() <= 4 * bound, name  # rank-1 estimates and block means err, here as everywhere
        if exact:
            assert step[fresh].abs().max() <= 1.01 * bound
            assert 0.01 < step[fresh].abs().median() < 1
    assert new.state[mine["more"]]["step"] == 1
    train_on(new, mine, 41, 44)
    assert all(p.isfinite().all() for p in mine.values())


def train_on(optimizer: Any, params: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        for name, p in params.items():
            p.grad = widened(name, step)
        optimizer.step()


def test_row_and_column_means_of_the_kept_part_stay() -> None:
    v = noise((24, 40), "v").square()
    grown = grow(v, (30, 64), seeded=True)
    torch.testing.assert_close(grown[:24].mean(1), v.mean(1))
    torch.testing.assert_close(grown[:, :40].mean(0), v.mean(0))
    assert_same(grow(v, (10, 64), seeded=True)[:, :40], v[:10])
    assert not grow(v, (30, 64))[24:].any()
    assert_same(grow(v, (12, 20)), v[:12, :20].contiguous())


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
    assert not fresh.state
    assert state_of(optimizer, params).keys() == OLD.keys()
