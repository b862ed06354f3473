"""State of any optimizer as that of any other: what is exact is exact, what is rounded says by how much."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import daypack
from daypack.checkpoint import foreign, load_file, save_file
from daypack.checkpoint.conversion import convert_snapshot

from ..conformance.scene import assert_same, clone, gradient, parameters, state_of, through_file, train, values
from ..conformance.specs import CASES, Case

PAIRS = [(a, b) for a in CASES for b in CASES]
STEPS = 6


def trained(case: Case, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """An optimizer and its parameters: copies of those that were trained first, for copies go on bit for bit."""
    key = (str(case), steps, dtype)
    if key not in TRAINED:
        params = parameters(dtype)
        optimizer = case.create(params.items())
        train(optimizer, params, range(steps))
        TRAINED[key] = optimizer, params
    return copy.deepcopy(TRAINED[key])


TRAINED: dict[tuple[str, int, torch.dtype], tuple[Any, Any]] = {}


@pytest.mark.parametrize(("case", "other"), PAIRS, ids=lambda c: str(c))
def test_any_to_any_goes_on(case: Case, other: Case, tmp_path: Path) -> None:
    """Every pair converts, saves, loads, and its next steps are finite; the old optimizer is untouched."""
    optimizer, params = trained(case)
    before = state_of(optimizer, params)
    new = daypack.convert(optimizer, other.spec.name, **other.options)
    assert_same(state_of(optimizer, params), before)
    assert [group["params"] for group in new.param_groups] == [group["params"] for group in optimizer.param_groups]
    assert new.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert new.param_groups[0]["param_names"] == list(params)
    save_file(new, tmp_path / "state.safetensors")
    mine = clone(params)
    again = other.create(mine.items())
    load_file(again, tmp_path / "state.safetensors")
    assert_same(state_of(again, mine), {name: s for name, s in state_of(new, params).items() if s})
    start = values(params)
    train(new, params, [STEPS])
    train(again, mine, [STEPS])
    assert_same(values(mine), values(params))
    lr = float(new.param_groups[0]["lr"])
    carried = not any(entry.moment == "state" for entry in new.conversion.entries)  # else some start anew
    for name, p in params.items():
        assert p.isfinite().all(), name
        if carried and "sgd" not in other.spec.name:
            assert (p - start[name]).abs().amax() <= 12 * lr if p.numel() else True, name


@pytest.mark.parametrize("case", [c for c in CASES if c.label != "plain"], ids=str)
def test_to_itself_is_exact(case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        optimizer, params = trained(case, dtype=dtype)
        mine = clone(params)
        new = daypack.convert(case_over(optimizer, case, mine), case.spec.name, **case.options)
        assert {entry.outcome for entry in new.conversion.entries} == {"exact"}
        assert_same(state_of(new, mine), state_of(optimizer, params))
        train(new, mine, range(STEPS, STEPS + 2))
        train(optimizer, params, range(STEPS, STEPS + 2))
        assert_same(values(mine), values(params))


def case_over(optimizer: Any, case: Case, params: Any) -> Any:
    other = case.create(params.items())
    other.load_state_dict(optimizer.state_dict())
    return other


def test_adamw_to_gefen_and_back_keeps_statistics_exactly() -> None:
    optimizer, params = trained(Case(*spec("adamw")))
    new = daypack.convert(optimizer, "gefen")
    v = optimizer.state[params["matrix"]]["exp_avg_sq"]
    state = new.state[params["matrix"]]
    torch.testing.assert_close(state["exp_avg_sq_row"], v.mean(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(state["exp_avg_sq_col"], v.mean(0), rtol=1e-5, atol=0)
    assert state["step"] == STEPS
    report = {(entry.param, entry.moment): entry for entry in new.conversion.entries}
    assert report["matrix", "exp_avg"].outcome == "requantised"
    assert 0 < report["matrix", "exp_avg"].error < 0.03
    assert report["vector", "exp_avg"].outcome == "exact"
    assert "requantised" in str(new.conversion)
    assert len(new.conversion.table().splitlines()) == len(new.conversion.entries)
    back = daypack.convert(new, "adamw")
    assert {e.outcome for e in back.conversion.entries} == {"exact", "expanded"}
    assert_same(back.state[params["vector"]]["exp_avg_sq"], optimizer.state[params["vector"]]["exp_avg_sq"])


def spec(name: str, **options: Any) -> tuple[Any, str, dict[str, Any]]:
    return next(case.spec for case in CASES if case.spec.name == name), "", options


def test_block_size_is_found_again_from_the_second_moment() -> None:
    sizes = torch.exp(3 * torch.randn(32, 8, generator=torch.Generator().manual_seed(1))).repeat_interleave(48, 1)
    p = torch.nn.Parameter(torch.zeros(32, 384))
    optimizer = daypack.AdamW([("p", p)])
    for step in range(4):
        p.grad = sizes * torch.randn(32, 384, generator=torch.Generator().manual_seed(step + 2))
        optimizer.step()
    new = daypack.convert(optimizer, "gefen", second_moment="blocks")
    assert int(new.state[p]["exp_avg_sq_block_size"]) == 48
    torch.testing.assert_close(
        new.state[p]["exp_avg_sq_block"], optimizer.state[p]["exp_avg_sq"].view(32, 8, 48).mean(-1), rtol=1e-5, atol=0
    )


def test_rules_keep_the_mean_of_gradients() -> None:
    """SGD's momentum adds up what Adam averages; a second moment that was never kept cannot be invented."""
    p = torch.nn.Parameter(torch.zeros(64, 64))
    sgd, adamw = daypack.SGD([p], lr=0.1, momentum=0.9), daypack.AdamW([p])
    for _ in range(40):
        p.grad = torch.ones_like(p)
        sgd.step()
        adamw.step()
    to_sgd = daypack.convert(adamw, "sgd", momentum=0.5)
    torch.testing.assert_close(to_sgd.state[p]["momentum_buffer"], torch.full((64, 64), 2.0), rtol=1e-3, atol=0)
    assert {e.outcome for e in to_sgd.conversion.entries} == {"exact", "dropped"} or to_sgd.conversion.entries
    for name in ("adamw", "gefen"):
        new = daypack.convert(sgd, name)
        assert "no second moment" in str(new.conversion)
        assert not new.state[p] or new.state[p]["step"] == 0
    other = daypack.convert(adamw, "adamw", betas=(0.5, 0.9))
    mean = other.state[p]["exp_avg"] / (1 - 0.5**40)
    torch.testing.assert_close(mean, torch.ones(64, 64), rtol=1e-4, atol=0)


def test_groups_and_their_own_options_are_kept() -> None:
    params = list(parameters().values())
    optimizer = daypack.AdamW(
        [{"params": params[:4], "lr": 0.5, "mine": "x"}, {"params": params[4:], "weight_decay": 0.0}], betas=(0.8, 0.99)
    )
    new = daypack.convert(optimizer, "gefen", block_size=64)
    first, second = new.param_groups
    assert (first["lr"], first["mine"], first["betas"], first["block_size"]) == (0.5, "x", (0.8, 0.99), 64)
    assert second["weight_decay"] == 0.0
    assert "decoupled_weight_decay" not in first
    with pytest.raises(ValueError, match="unknown optimizer 'nothing'"):
        daypack.convert(optimizer, "nothing")
    with pytest.raises(ValueError, match="Adagrad is not known"):
        daypack.convert(torch.optim.Adagrad(params), "gefen")


# ------------------------------------------------------ other libraries' state


def dynamic_map() -> torch.Tensor:
    levels = torch.cat([-torch.logspace(0, -6, 127), torch.zeros(1), torch.logspace(-6, 0, 128)])
    return levels.sort().values


def quantize(x: torch.Tensor, levels: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes shaped like ``x``, absmax per ``block`` of the flattened tensor, and what they stand for."""
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % block)).view(-1, block)
    absmax = flat.abs().amax(1)
    codes = (flat / absmax.clamp_min(1e-30)[:, None]).unsqueeze(-1).sub(levels).abs().argmin(-1)
    value = (levels[codes] * absmax[:, None]).reshape(-1)[: x.numel()].view(x.shape)
    return codes.to(torch.uint8).reshape(-1)[: x.numel()].view(x.shape), absmax, value


def bitsandbytes_dict(nested: bool, block: int, second: bool = True) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A state dict in bitsandbytes' published layout: one large tensor, one below its 4096 elements in fp32."""
    m, v = gradient("m", (37, 300), 0).float(), gradient("v", (37, 300), 1).float().square()
    book, upper = dynamic_map(), torch.linspace(0, 1, 256)
    codes1, absmax1, m8 = quantize(m, book, block)
    codes2, absmax2, v8 = quantize(v, upper, block)
    state = {"state1": codes1, "qmap1": book, "absmax1": absmax1}
    state |= {"state2": codes2, "qmap2": upper, "absmax2": absmax2} if second else {}
    plain = {"state1": m[0].clone()} | ({"state2": v[0].clone()} if second else {})
    entry = {0: {"step": 7, **({"__bnb_optimizer_quant_state__": state} if nested else state)}, 1: {"step": 7, **plain}}
    group = {"params": [0, 1], "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "alpha": 0.0}
    return {"state": entry, "param_groups": [group]}, {"m": m8, "v": v8, "m1": m[0], "v1": v[0]}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [256, 2048])
def test_bitsandbytes_layout(nested: bool, block: int, tmp_path: Path) -> None:
    saved, wanted = bitsandbytes_dict(nested, block)
    torch.save(saved, tmp_path / "bnb.pt")
    source = foreign.read(tmp_path / "bnb.pt")
    assert source.optimizer == "AdamW"
    plain, report = convert_snapshot(source, "adamw")
    states = list(plain.state.values())
    assert_same(states[0]["exp_avg"], wanted["m"])
    assert_same(states[0]["exp_avg_sq"], wanted["v"])
    assert_same(states[1]["exp_avg"], wanted["m1"])
    assert states[0]["step"] == 7
    assert report.counts() == {"exact": 4}
    new, report = convert_snapshot(source, "gefen")
    torch.testing.assert_close(next(iter(new.state.values()))["exp_avg_sq_row"], wanted["v"].mean(1), rtol=1e-5, atol=0)
    save_file(new, tmp_path / "out.safetensors")
    params = [torch.nn.Parameter(torch.zeros(37, 300)), torch.nn.Parameter(torch.zeros(300))]
    load_file(daypack.Gefen(params), tmp_path / "out.safetensors")


def test_bitsandbytes_momentum_needs_its_name(tmp_path: Path) -> None:
    saved, wanted = bitsandbytes_dict(True, 256, second=False)
    saved["param_groups"][0]["betas"] = (0.9, 0.0)
    torch.save(saved, tmp_path / "bnb.pt")
    with pytest.raises(ValueError, match="--from"):
        foreign.read(tmp_path / "bnb.pt")
    source = foreign.read(tmp_path / "bnb.pt", "sgd")
    new, _ = convert_snapshot(source, "sgd")
    assert_same(next(iter(new.state.values()))["momentum_buffer"], wanted["m"])
    assert new.param_groups[0]["momentum"] == 0.9


class OptimState8bit(torch.Tensor):
    """A stand-in for torchao's tensor: codes, one scale per block of the flattened tensor, qmap."""

    codes: torch.Tensor
    value: torch.Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.value.to(dtype)


def test_torchao_tensors_decode_themselves() -> None:
    m, v = gradient("m", (32, 256), 0).float(), gradient("v", (32, 256), 1).float().square()
    state: dict[str, Any] = {"step": torch.tensor(5.0)}
    for key, x in (("exp_avg", m), ("exp_avg_sq", v)):
        codes, _, value = quantize(x, dynamic_map(), 256)
        state[key] = torch.zeros(32, 256).as_subclass(OptimState8bit)
        state[key].codes, state[key].value = codes, value
    packed = {"state": {0: state}, "param_groups": [{"params": [0], "lr": torch.tensor(1e-3), "betas": (0.9, 0.999)}]}
    new, report = convert_snapshot(foreign.of_state_dict(packed, "AdamW", None, False), "adamw")
    assert_same(next(iter(new.state.values()))["exp_avg"], state["exp_avg"].value)
    assert report.counts() == {"exact": 2}


def test_the_optimizer_of_a_bare_state_dict_is_found() -> None:
    for case in CASES:
        if case.label == "plain":
            continue
        optimizer, params = trained(case, 2)
        if case.label == "low":
            with pytest.raises(ValueError, match="does not tell"):
                foreign.of_state_dict(through_file(optimizer.state_dict()), None, None, named=True)
            continue
        found = foreign.of_state_dict(through_file(optimizer.state_dict()), None, None, named=True)
        assert found.optimizer == type(optimizer).__name__, case
        assert found.params["matrix"].shape == (24, 520)
        new, _ = convert_snapshot(found, case.spec.name, **case.options)
        assert_same(next(iter(new.state.values())), optimizer.state[params["matrix"]], str(case))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", ["adamw", "gefen"])
def test_state_as_distributed_checkpoints_name_it(name: str, flat: bool, tmp_path: Path) -> None:
    """Names for keys, nested or flattened, as torch's getter returns them; groups in another order than the modules."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(300, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 33))
    groups = daypack.param_groups(model, weight_decay=0.3)
    optimizer = daypack.create(name, groups, lr=1e-3)
    params = dict(model.named_parameters())
    train(optimizer, params, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    torch.save(get_optimizer_state_dict(model, optimizer, options=options), tmp_path / "state.pt")
    found = foreign.read(tmp_path / "state.pt")
    assert found.named
    assert {*found.params} == {*params}
    for settings, names in found.groups:
        assert {params[n].dim() > 1 for n in names} == {settings["weight_decay"] == 0.3}
    new, report = convert_snapshot(found, "adamw")
    expected = daypack.convert(optimizer, "adamw")
    ours = {n: p for group in new.param_groups for n, p in zip(group["param_names"], group["params"], strict=True)}
    for n, p in params.items():
        assert_same(new.state[ours[n]], expected.state[p], n)
    assert {entry.outcome for entry in report.entries} <= {"exact", "expanded"}
