from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack
from daypack.calibration import maps

from ..conformance.scene import noise, parameters, set_gradients, train, values
from ..conformance.specs import CASES, Case

ALWAYS = {"state_bytes", "update_rms", "update_rms/group_0", "nonfinite", "skipped", "step_ms", "step_share"}


def last(handle: daypack.telemetry.Monitor) -> dict[str, float]:
    return {tag.removeprefix("optimizer/"): value for tag, value in handle.readings[-1].values.items()}


def small() -> dict[str, Parameter]:
    """Parameters so small that a sample is all of them, of whole blocks."""
    return {name: Parameter(noise(shape, name).float()) for name, shape in (("a", (4, 256)), ("b", (2, 256)))}


def decoded(state: dict[str, Any], name: str) -> Tensor:
    """A moment of `small` by the definition of its format, in fp64."""
    codes, scale = state[name + "_codes"], state[name + "_scale"].double()
    book = state.get(name + "_codebook")
    levels = maps.levels("signed dynamic" if name == "exp_avg" else "unsigned dynamic") if book is None else book
    return levels.double()[codes.long()] * scale.repeat_interleave(256, dim=-1)


def momentum(name: str, group: dict[str, Any], m: Tensor, g: Tensor, p: Tensor) -> Tensor:
    """The first moment that an optimizer should come to, in fp64."""
    g = -g if group["maximize"] else g
    if name in ("adam8bit", "sgd8bit"):
        g = g + group["weight_decay"] * p
    if name == "sgd8bit":
        return group["momentum"] * m + (1 - group["dampening"]) * g
    beta = group["betas"][1 if name == "lion8bit" else 0]
    return beta * m + (1 - beta) * g


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gefen", {}),
        ("gefen", {"second_moment": "blocks", "maximize": True}),
        ("adam_mini", {"bits": 8}),
        ("lamb", {"bits": 8}),
        ("adamw8bit", {"min_8bit_size": 1}),
        ("adam8bit", {"min_8bit_size": 1, "weight_decay": 0.3, "maximize": True}),
        ("sgd8bit", {"min_8bit_size": 1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.3}),
        ("lion8bit", {"min_8bit_size": 1}),
    ],
)
def test_numbers_are_those_of_the_whole_where_a_sample_is_the_whole(name: str, options: dict[str, Any]) -> None:
    """Beside a twin that knows nothing of samples, chunks or rules."""
    params = small()
    optimizer = daypack.create(name, params.values(), lr=1e-2, **options)
    handle = daypack.monitor(optimizer, interval=1)
    train(optimizer, params, range(3))
    stored = {p: copy.deepcopy(optimizer.state[p]) for p in params.values()}
    before = {p: p.detach().double() for p in params.values()}
    train(optimizer, params, [3])

    moved = torch.cat([(p.detach().double() - before[p]).flatten() for p in params.values()])
    exact = [
        momentum(name, optimizer.param_groups[0], decoded(stored[p], "exp_avg"), p.grad.double(), before[p])
        for p in params.values()
    ]
    kept = [decoded(optimizer.state[p], "exp_avg") for p in params.values()]
    m, q = torch.cat([x.flatten() for x in exact]), torch.cat([x.flatten() for x in kept])
    codes = torch.cat([optimizer.state[p]["exp_avg_codes"].flatten() for p in params.values()])
    found = last(handle)
    assert found["update_rms"] == pytest.approx(moved.square().mean().sqrt().item(), rel=1e-5)
    bias = ((q - m) * m).sum() / m.square().sum()
    assert found["exp_avg/radial_bias"] == pytest.approx(bias.item(), rel=1e-2, abs=2e-7)
    assert abs(bias) > 1e-6, "the test would not see a bias of 0"
    assert found["exp_avg/zero"] == pytest.approx((q == 0).float().mean().item())
    assert found["exp_avg/saturated"] == pytest.approx(((codes == 0) | (codes == 255)).float().mean().item())
    if "exp_avg_sq_codes" in optimizer.state[params["a"]]:
        v = torch.cat([optimizer.state[p]["exp_avg_sq_codes"].flatten() for p in params.values()])
        assert found["exp_avg_sq/saturated"] == pytest.approx((v == 255).float().mean().item())
    assert found["state_bytes"] == daypack.state_report(optimizer).total_bytes


def test_a_sample_speaks_for_the_whole() -> None:
    """Of a large matrix, rows of very different size and columns of different size, within its sampling error."""
    p = Parameter(torch.zeros(700, 1100))
    rows, cols = torch.logspace(-0.5, 0.5, 700)[:, None], torch.logspace(-0.5, 0.5, 1100)
    optimizer = daypack.SGD8bit([p], lr=1.0)
    handle = daypack.monitor(optimizer, interval=1)
    for step in range(20):
        p.grad = noise(tuple(p.shape), f"g{step}").float() * rows * cols
        optimizer.step()
    ratios = []
    for step, reading in enumerate(handle.readings):
        true = (noise(tuple(p.shape), f"g{step}").float() * rows * cols).square().mean().sqrt().item()
        ratios.append(reading.values["optimizer/update_rms"] / true)
    assert all(0.85 < ratio < 1.18 for ratio in ratios), ratios
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.02)
    assert len({round(ratio, 6) for ratio in ratios}) == len(ratios), "every reading looks at other elements"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_optimizer_can_be_watched_and_trains_on_as_if_it_were_not(case: Case) -> None:
    params, twins = parameters(), parameters()
    watched, plain = case.create(params.values()), case.create(twins.values())
    handle = daypack.monitor(watched, interval=2)
    train(watched, params, range(5))
    train(plain, twins, range(5))
    for a, b in zip(values(params).values(), values(twins).values(), strict=True):
        assert torch.equal(a, b)
    assert [reading.step for reading in handle.readings] == [2, 4]
    found = last(handle)
    assert set(found) >= ALWAYS
    assert found["state_bytes"] == daypack.state_report(watched).total_bytes
    kinds = {tag: value for tag, value in found.items() if tag.startswith("state_bytes/")}
    assert sum(kinds.values()) == found["state_bytes"]
    assert found["update_rms"] > 0
    assert all(torch.isfinite(torch.tensor(value)) for value in found.values())
    coded = {"exp_avg/saturated", "exp_avg/zero"} <= set(found)
    assert coded == any(key.startswith("exp_avg_codes") for state in watched.state.values() for key in state)
    assert 0 < found["step_share"] <= 1


def test_what_an_optimizer_does_not_have_is_left_out() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params.values())
    with daypack.monitor(optimizer, interval=1) as handle:
        train(optimizer, params, [0])
    assert set(last(handle)) == ALWAYS | {"state_bytes/dense", "state_bytes/counter"}


def test_unusual_parameters() -> None:
    """Complex, non-contiguous, empty, scalar, 16-bit, sparse gradients: whatever torch's own optimizers take."""
    params = [
        Parameter(torch.ones(40, 50, dtype=torch.complex64)),
        Parameter(noise((60, 70), "t").float().t()),
        Parameter(torch.ones(0, 5)),
        Parameter(torch.ones(())),
        Parameter(torch.ones(33, 65, dtype=torch.bfloat16)),
    ]
    optimizer = torch.optim.SGD(params, lr=0.5)
    handle = daypack.monitor(optimizer, interval=1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    # A complex number counts as one element whose movement is that of either part, half of it each.
    assert last(handle)["update_rms"] == pytest.approx(0.5, rel=0.2)
    sparse = torch.nn.Embedding(50, 64, sparse=True)
    rows = torch.optim.SparseAdam(sparse.parameters())
    handle = daypack.monitor(rows, interval=1)
    sparse(torch.tensor([1, 2])).sum().backward()
    rows.step()
    assert last(handle)["nonfinite"] == 0


def test_writers_get_tag_value_and_step() -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.seen.append((tag, scalar_value, global_step))

    params, board, calls = parameters(), Writer(), Writer()
    optimizer = daypack.Gefen(params.values())
    handle = daypack.monitor(optimizer, board, interval=2)
    daypack.monitor(optimizer, calls.add_scalar, interval=3, prefix="other/")
    train(optimizer, params, range(6))
    assert board.seen == [(tag, x, r.step) for r in handle.readings for tag, x in r.values.items()]
    assert {step for _, _, step in board.seen} == {2, 4, 6}
    assert {step for _, _, step in calls.seen} == {3, 6}
    assert {tag.partition("/")[0] for tag, _, _ in calls.seen} == {"other"}


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    params = parameters()
    optimizer = daypack.Gefen(params.values())
    with tensorboard.SummaryWriter(tmp_path) as writer, daypack.monitor(optimizer, writer, interval=2) as handle:
        train(optimizer, params, range(4))
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(handle.readings[-1].values)
    assert [event.step for event in found.Scalars("optimizer/update_rms")] == [2, 4]


def test_a_removed_monitor_reads_no_more() -> None:
    params = parameters()
    optimizer = daypack.AdamW8bit(params.values())
    with daypack.monitor(optimizer, interval=1) as inner:
        outer = daypack.monitor(optimizer, interval=1)
        train(optimizer, params, range(2))
    train(optimizer, params, range(2, 5))
    outer.remove()
    outer.remove()
    train(optimizer, params, range(5, 7))
    assert (len(inner.readings), len(outer.readings)) == (2, 5)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("name", ["gefen", "adamw"])
def test_copies_saved_state_and_pickles_know_nothing_of_it(name: str) -> None:
    params, twins = parameters(), parameters()
    optimizer, plain = daypack.create(name, params.values()), daypack.create(name, twins.values())
    handle = daypack.monitor(optimizer, interval=1)
    train(optimizer, params, range(2))
    train(plain, twins, range(2))
    assert str(optimizer.state_dict()) == str(plain.state_dict())
    assert optimizer.param_groups[0].keys() == plain.param_groups[0].keys()
    assert len(pickle.dumps(optimizer)) == len(pickle.dumps(plain))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        other.step()
    assert len(handle.readings) == 2


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_it_keeps_nothing_alive() -> None:
    """The monitor makes no circle, which only the garbage collector could free."""
    params = parameters()
    with without_collector():
        optimizer = torch.optim.SGD(params.values(), lr=0.1)
        handle = daypack.monitor(optimizer, interval=1)
        train(optimizer, params, [0])
        gone = weakref.ref(handle)
        del handle
        train(optimizer, params, [1])
        assert gone() is not None
        assert len(gone().readings) == 2
        optimizer._optimizer_step_pre_hooks.clear()  # what torch frees with an optimizer
        optimizer._optimizer_step_post_hooks.clear()
        assert gone() is None


def test_what_is_not_finite_is_counted() -> None:
    params = parameters()
    ours, handles = daypack.Gefen(params.values(), lr=1e-3), []
    theirs = torch.optim.SGD(params.values(), lr=1e-3)
    for optimizer in (ours, theirs):
        handles.append(daypack.monitor(optimizer, interval=2))
    set_gradients(params, 0)
    ours.step()
    set_gradients(params, 1)
    params["matrix"].grad[0, 0] = torch.inf
    with pytest.warns(UserWarning, match="not finite"):
        ours.step()
    assert (last(handles[0])["skipped"], last(handles[0])["nonfinite"]) == (1, 0)
    for _ in range(2):
        set_gradients(params, 1)
        ours.step()
    assert last(handles[0])["skipped"] == 0, "counted since the reading before"
    params["vector"].grad.fill_(torch.nan)
    theirs.step()
    theirs.step()
    assert (last(handles[1])["skipped"], last(handles[1])["nonfinite"]) == (0, 1)
    assert torch.isfinite(torch.tensor(last(handles[1])["update_rms"]))


def test_steps_are_counted_on_after_a_resume() -> None:
    params = parameters()
    optimizer = daypack.Gefen(params.values())
    train(optimizer, params, range(5))
    again = daypack.Gefen(params.values())
    handle = daypack.monitor(again, interval=2)
    again.load_state_dict(optimizer.state_dict())
    train(again, params, range(5, 7))
    assert [reading.step for reading in handle.readings] == [7]


def test_a_step_with_a_closure_and_one_that_fails() -> None:
    p = Parameter(torch.ones(4, 256))
    optimizer = daypack.Gefen([p], nonfinite="raise")
    handle = daypack.monitor(optimizer, interval=1)

    def closure() -> float:
        p.grad = torch.ones_like(p)
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert optimizer.step(closure) == 1.0
    assert "optimizer/exp_avg/radial_bias" in handle.readings[-1].values
    p.grad = torch.full_like(p, torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        optimizer.step()
    optimizer.step(closure)
    assert [reading.step for reading in handle.readings] == [1, 2, 3]


def test_readings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["daypack.telemetry.monitor"], "KEPT", 3)
    p = Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([p])
    handle = daypack.monitor(optimizer, interval=1)
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert [reading.step for reading in handle.readings] == [3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"optimizer": object()}, "takes a torch.optim.Optimizer, got object"),
        ({"interval": 0}, "interval of monitor must be a whole number of at least 1, got 0"),
        ({"interval": 2.5}, "got 2.5"),
        ({"interval": True}, "got True"),
        ({"writer": "runs/board"}, "writer of monitor must have add_scalar"),
    ],
)
def test_bad_arguments_are_refused_and_hook_nothing(arguments: dict[str, Any], problem: str) -> None:
    optimizer = torch.optim.SGD([Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=problem):
        daypack.monitor(**{"optimizer": optimizer, **arguments})
    assert not optimizer._optimizer_step_pre_hooks


def test_options_of_an_inner_optimizer_are_read_as_it_reads_them() -> None:
    """GaLore's groups have betas; the rule of its inner optimizer wants a momentum."""
    params = small()
    with pytest.warns(UserWarning, match="projects nothing"):
        optimizer = daypack.create(
            "galore", params.values(), inner="sgd8bit", inner_options={"momentum": 0.9, "min_8bit_size": 1}
        )
    handle = daypack.monitor(optimizer, interval=1)
    train(optimizer, params, range(3))
    assert last(handle)["update_rms"] > 0
    assert daypack.inspect_state(optimizer).params[0].update is not None
