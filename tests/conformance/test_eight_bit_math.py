"""The 8-bit optimizers against their textbook twins, and beside bitsandbytes and torchao where those are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import daypack
from daypack.calibration import maps

from ..reference.eight_bit import EightBit
from .scene import gradient, held_by, noise, parameters, train, values
from .specs import CASES as ALL

# Whole and ragged blocks, experts, a convolution, one row and short rows; then a vector, and what is too small.
SHAPES: list[tuple[int, ...]] = [(24, 520), (8, 24, 40), (32, 16, 3, 3), (1, 5000), (300, 48), (5000,), (60, 60)]
ADAM = {"betas": (0.8, 0.95), "eps": 1e-6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw8bit": ("adamw", {}),
    "adamw8bit-all-changed": ("adamw", {**ADAM, "weight_decay": 0.3, "maximize": True, "block_size": 100}),
    "adamw8bit-linear": ("adamw", {"map": "linear"}),
    "adamw8bit-companded": ("adamw", {"map": "companded"}),
    "adam8bit-decayed": ("adam", {**ADAM, "weight_decay": 0.3, "maximize": True}),
    "sgd8bit": ("sgd", {"lr": 0.1, "momentum": 0.9}),
    "sgd8bit-plain": ("sgd", {"lr": 0.1, "weight_decay": 0.1}),
    "sgd8bit-dampened": ("sgd", {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    "sgd8bit-nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "lion8bit": ("lion", {"weight_decay": 0.3}),
    "lion8bit-all-changed": ("lion", {"betas": (0.7, 0.8), "weight_decay": 0.3, "maximize": True, "map": "companded"}),
}


@pytest.mark.parametrize("name", CASES)
def test_eight_bits_are_their_twin(name: str) -> None:
    """fp64: parameters to rounding, codes and scales exactly."""
    kind, options = CASES[name]
    params = parameters(torch.float64, {str(shape): shape for shape in SHAPES})
    optimizer = daypack.create(name.split("-")[0], params.values(), **options)
    group = optimizer.param_groups[0]
    # The levels in fp32, as they are used; that they are the right ones is tests/calibration/test_maps.py.
    signed, unsigned = (maps.levels(f"{sign} {group['map']}").double().numpy() for sign in ("signed", "unsigned"))
    twins = {
        n: EightBit(kind, tuple(p.shape), group, group["map"], group["block_size"], (signed, unsigned))
        for n, p in params.items()
    }
    expected = {n: p.numpy() for n, p in values(params).items()}
    for step in range(4):
        train(optimizer, params, [step])
        for n, p in params.items():
            if p.numel() < 4096 or p.dim() < 2:
                continue
            twin = twins[n]
            expected[n] = twin.step(expected[n], gradient(n, p.shape, step).numpy())
            np.testing.assert_allclose(p.detach().numpy(), expected[n], rtol=1e-11, atol=1e-14, err_msg=n)
            for key, moment in (("exp_avg", twin.m), ("exp_avg_sq", twin.v)):
                if key == "exp_avg_sq" and kind in ("sgd", "lion"):
                    continue
                state = optimizer.state[p]
                codes = state[key + "_codes"].numpy().reshape(moment.codes.shape)
                # Thresholds are midpoints rounded to fp32: once in 100,000 values that matters.
                assert (codes != moment.codes).sum() <= 1, (n, key)
                moment.adopt(codes)
                np.testing.assert_allclose(
                    state[key + "_scale"].numpy().reshape(moment.scale.shape), moment.scale, rtol=1e-9, err_msg=n
                )
    for n in ("(5000,)", "(60, 60)"):  # a vector, below 4096 elements
        assert "exp_avg" in optimizer.state[params[n]]


@pytest.mark.parametrize(("name", "options"), [("sgd8bit", {"momentum": 0.9, "nesterov": True}), ("adam8bit", {})])
def test_what_stays_in_fp32_is_the_namesake_to_the_ulp(name: str, options: dict[str, Any]) -> None:
    cls = {"sgd8bit": torch.optim.SGD, "adam8bit": torch.optim.Adam}[name]
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    optimizer = daypack.create(name, ours.values(), lr=0.1, weight_decay=0.1, bits=32, **options)
    reference = cls(theirs.values(), lr=0.1, weight_decay=0.1, **options)  # type: ignore[operator]
    train(optimizer, ours, range(5))
    train(reference, theirs, range(5))
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-12, atol=1e-14)


def test_what_is_kept_in_32_bits() -> None:
    """Small parameters, embeddings as the group builder marks them, groups with bits=32, and very short rows."""
    model = torch.nn.ModuleDict(
        {
            "tokens": torch.nn.Embedding(100, 64),
            "first": torch.nn.Linear(64, 128, bias=False),
            "small": torch.nn.Linear(63, 65),
            "last": torch.nn.Linear(64, 128, bias=False),
        }
    )
    groups = daypack.param_groups(model)
    short = Parameter(torch.zeros(5000, 1))
    optimizer = daypack.AdamW8bit([*groups, {"params": [("short", short)]}])
    optimizer.materialize_state()

    def coded() -> set[str]:
        names = {id(p): name for name, p in model.named_parameters()} | {id(short): "short"}
        return {names[id(p)] for p, state in optimizer.state.items() if "exp_avg_codes" in state}

    assert coded() == {"first.weight", "last.weight"}
    optimizer = daypack.AdamW8bit(
        [
            {"params": [("first.weight", model["first"].weight)], "bits": 32},
            {"params": [("small.weight", model["small"].weight)], "min_8bit_size": 1000},
            {"params": [("tokens.weight", model["tokens"].weight)]},
            {"params": [("last.weight", model["last"].weight)], "min_8bit_size": 10_000},
        ]
    )
    optimizer.materialize_state()
    assert coded() == {"small.weight", "tokens.weight"}


@pytest.mark.parametrize("name", ["adamw8bit", "adam8bit"])
def test_second_moment_that_is_not_zero_is_not_stored_as_zero(name: str) -> None:
    """v from 1e-12 to 1 within a block: no element steps by more than twice the rate, and zeros stay zeros."""
    p = Parameter(torch.zeros(16, 256))
    optimizer = daypack.create(name, [p], lr=1e-3, weight_decay=0.0)
    size = torch.logspace(-6, 0, 256)
    size[::7] = 0
    for step in range(50):
        before = p.detach().clone()
        p.grad = size * noise((16, 256), "sign", step).sign().float()
        optimizer.step()
        assert (p - before).abs().max() <= 2e-3
    codes = optimizer.state[p]["exp_avg_sq_codes"]
    assert torch.equal(codes == 0, (size == 0).expand(16, 256))
    assert (p[:, ::7] == 0).all()


@pytest.mark.parametrize("name", ["adamw8bit", "adam8bit", "sgd8bit", "lion8bit"])
def test_adapter_large_enough_for_8_bits_trains_as_the_namesake(name: str) -> None:
    """LoRA: B is 0 at the start, so A's first gradient is exactly 0, which must not freeze or disturb anything."""
    case = next(case for case in ALL if str(case) == name)
    x, target = noise((64, 512), "x").float() / 16, noise((64, 512), "y").float()

    def run(make: Any) -> list[float]:
        a, b = Parameter(0.1 * noise((16, 512), "a").float()), Parameter(torch.zeros(512, 16))
        optimizer, losses = make([a, b]), []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (x @ a.T @ b.T - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        stored.append({key for p in (a, b) for key in optimizer.state[p]})
        return losses

    stored: list[set[str]] = []
    options = {"lr": case.spec.adapter_lr, "weight_decay": 0.0}
    reference = run(lambda params: case.namesake(params, **options))
    losses = run(lambda params: case.create(params, **options))
    assert "exp_avg_codes" in stored[1] - stored[0]
    assert "exp_avg" not in stored[1]
    assert abs(losses[-1] - reference[-1]) < 0.05 * (reference[0] - reference[-1]), (losses[-1], reference[-1])


def test_learned_map_is_as_good_as_gefens() -> None:
    """The same codebook component, learned at the first step; the second moment stays in the dynamic map."""
    params = parameters(shapes={"m": (64, 512)})
    optimizer = daypack.AdamW8bit(params.values(), map="learned")
    train(optimizer, params, range(2))
    state = optimizer.state[params["m"]]
    assert state["exp_avg_codebook"].any()
    assert "exp_avg_sq_codebook" not in state
    assert held_by(optimizer, params["m"]) < 2.03 * 64 * 512 + 1100


@pytest.mark.parametrize("option", [{"map": "linear"}, {"map": "companded"}, {"map": "learned"}, {"block_size": 64}])
@pytest.mark.parametrize("name", ["adamw8bit", "adam8bit", "sgd8bit", "lion8bit"])
def test_every_option_of_the_storage_has_an_effect(name: str, option: dict[str, Any]) -> None:
    def outcome(**options: Any) -> torch.Tensor:
        params = parameters(shapes={"m": (24, 768)})
        momentum = {"momentum": 0.9} if name == "sgd8bit" else {}
        train(daypack.create(name, params.values(), **momentum, **options), params, range(4))
        return values(params)["m"]

    assert not torch.equal(outcome(), outcome(**option))


def test_nesterov_needs_momentum() -> None:
    for wrong in ({}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match="nesterov"):
            daypack.SGD8bit([Parameter(torch.zeros(3))], nesterov=True, **wrong)


# ---------------------------------------------------------------- others' implementations


Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def beside(ours: Make, theirs: Make, rough: bool = False) -> tuple[float, float]:
    """Distance of two paths over one matrix, relative to the second one's length: after one step, after 20.

    Args:
        rough: gradients whose rows and columns differ by orders of magnitude.
    """
    p, q = (Parameter(0.5 * noise((64, 1024), "p").float()) for _ in range(2))
    start = p.detach().clone()
    a, b = ours([p]), theirs([q])
    distances = []
    for step in range(20):
        p.grad = (gradient("p", (64, 1024), step) if rough else 0.01 * noise((64, 1024), step)).float()
        q.grad = p.grad.clone()
        a.step()
        b.step()
        distances.append((p.detach() - q.detach()).norm().item() / (q.detach() - start).norm().item())
    return distances[0], distances[-1]


@pytest.mark.parametrize("name", ["adamw8bit", "sgd8bit", "lion8bit"])
def test_beside_bitsandbytes(name: str) -> None:
    """The same blocks and maps: the first step agrees to rounding, later ones but for values between two levels."""
    optim = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim
    cls, options = {
        "adamw8bit": (optim.AdamW8bit, {"lr": 1e-3, "weight_decay": 0.1}),
        "sgd8bit": (optim.SGD8bit, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
        "lion8bit": (optim.Lion8bit, {"lr": 1e-4, "weight_decay": 0.1}),
    }[name]
    first, last = beside(lambda params: daypack.create(name, params, **options), lambda params: cls(params, **options))
    assert first < 1e-5, first
    assert last < 0.02, last


def test_rough_gradients_leave_us_nearer_to_adamw_than_bitsandbytes() -> None:
    """Its kernel for the CPU does not always choose the nearest level, most of all for second moments."""
    optim = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim

    def distance(cls: Any) -> float:
        return beside(
            lambda params: cls(params, weight_decay=0.1),
            lambda params: torch.optim.AdamW(params, weight_decay=0.1),
            True,
        )[1]

    assert distance(daypack.AdamW8bit) < 0.8 * distance(optim.AdamW8bit)


def test_beside_torchao() -> None:
    """Its scales and levels are the same, its blocks run over rows."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    options = {"lr": 1e-3, "weight_decay": 0.1}
    with torch.compiler.set_stance("force_eager"):
        first, last = beside(
            lambda params: daypack.AdamW8bit(params, **options), lambda params: optim.AdamW8bit(params, **options)
        )
    assert first < 1e-4, first
    assert last < 0.005, last
