"""The twins of ADOPT, AdEMAMix and Muon against numbers worked out by hand, torch, and other ways to a result."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from .ademamix import AdEMAMix, alpha_at, beta3_at
from .adopt import Adopt
from .gefen import Array
from .muon import Muon, factor_of, orthogonalized

Twin = Adopt | AdEMAMix


def run(twin: Twin | Muon, p: Array, gradients: list[Array]) -> Array:
    for g in gradients:
        p = twin.step(p, g)
    return p


def numbers(*values: float) -> Array:
    return np.array(values, np.float64)


def noise(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


# ADOPT


def test_adopt_by_hand() -> None:
    twin, p = Adopt(lr=0.1, betas=(0.5, 0.5), weight_decay=0.1), numbers(1.0)
    p = twin.step(p, numbers(2.0))
    assert [*p, *twin.m, *twin.v.v] == [1, 0, 4]  # not even decayed
    p = twin.step(p, numbers(6.0))  # 6 / 2, clipped to 1
    assert [*twin.m, *twin.v.v] == [0.5, 20]
    assert p == pytest.approx(0.99 - 0.05)
    p = twin.step(p, numbers(-20.0))  # -20 / sqrt(20) = -4.47, clipped to -(2 ** 0.25) = -1.1892
    assert twin.m == pytest.approx(0.25 - 1.189207115002721 / 2)
    assert p == pytest.approx(0.94 * 0.99 + 0.1 * 0.3446035575013605)
    assert twin.v.v == pytest.approx(210)
    twin.step(p, numbers(1.0))  # within the bounds
    assert twin.m == pytest.approx(-0.17230177875068025 + 0.5 / math.sqrt(210))


def test_adopt_divides_by_eps_where_there_was_no_gradient() -> None:
    twin = Adopt(lr=1.0, betas=(0.0, 0.5))
    assert run(twin, numbers(0.0, 0.0), [numbers(0.0, 0.0), numbers(1e-7, 3.0)]) == pytest.approx([-0.1, -1.0])


def test_adopt_with_coupled_decay_has_it_in_the_first_second_moment() -> None:
    twin = Adopt(lr=1.0, betas=(0.0, 0.5), weight_decay=0.5, decoupled=False)
    p = twin.step(numbers(2.0), numbers(3.0))
    assert [*p, *twin.v.v] == [2, 16]
    assert twin.step(p, numbers(1.0)) == pytest.approx(2 - 2 / 4)


def test_adopt_factored_reads_the_factors_before_the_gradient_enters() -> None:
    twin = Adopt(lr=1.0, betas=(0.0, 0.5), factored=True)
    first = np.array([[1.0, 1.0], [1.0, 3.0]])  # rows of squares have the means 1 and 5, so have columns
    p = twin.step(np.zeros((2, 2)), first)
    p = twin.step(p, np.array([[0.1, 0.2], [0.3, 0.4]]))
    v = np.array([[1 / 3, 5 / 3], [5 / 3, 25 / 3]])
    assert p == pytest.approx(-np.array([[0.1, 0.2], [0.3, 0.4]]) / np.sqrt(v))
    assert twin.v.row == pytest.approx([0.5 + 0.025 / 2, 2.5 + 0.125 / 2])
    assert twin.v.col == pytest.approx([0.5 + 0.05 / 2, 2.5 + 0.1 / 2])


# AdEMAMix


def test_ademamix_by_hand() -> None:
    twin, p = AdEMAMix(lr=0.1, betas=(0.5, 0.75, 0.9), alpha=2.0, eps=0.0, weight_decay=0.5), numbers(1.0)
    p = twin.step(p, numbers(4.0))  # m1 / (1 - b1) = 4, m2 = 0.4, v / (1 - b2) = 16
    assert p == pytest.approx(1 - 0.1 * ((4 + 2 * 0.4) / 4 + 0.5))
    q = twin.step(p, numbers(-2.0))  # m1 = 0, m2 = 0.16, v = 0.75 * 4 + 0.25 * 4 = 4
    assert q == pytest.approx(p - 0.1 * (2 * 0.16 / math.sqrt(4 / (1 - 0.75**2)) + 0.5 * p))


def test_ademamix_without_a_slow_average_is_adamw() -> None:
    p, gradients = noise(0, 5, 7), [noise(seed, 5, 7) for seed in range(1, 6)]
    theirs = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.2)
    for g in gradients:
        theirs.grad = torch.from_numpy(g)
        optimizer.step()
    ours = run(AdEMAMix(lr=0.1, weight_decay=0.2, alpha=0.0), p, gradients)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-12)


def test_alpha_grows_in_a_straight_line() -> None:
    assert [alpha_at(t, 5.0, 10) for t in (1, 5, 10, 11)] == [0.5, 2.5, 5.0, 5.0]
    assert alpha_at(1, 5.0, None) == 5.0


def test_the_half_life_of_the_slow_average_grows_in_a_straight_line() -> None:
    def life(beta: float) -> float:
        return math.log(0.5) / math.log(beta)

    lives = [life(beta3_at(t, 0.9, 0.9999, 8)) for t in range(9)]
    np.testing.assert_allclose(lives, np.linspace(life(0.9), life(0.9999), 9), rtol=1e-9)
    assert beta3_at(9, 0.9, 0.9999, 8) == beta3_at(1, 0.9, 0.9999, None) == 0.9999
    assert life(beta3_at(2, 0.0, 0.5, 4)) == pytest.approx(0.5)


def test_the_formula_of_the_paper_for_beta3() -> None:
    start, end, share = math.log(0.9), math.log(0.9999), 3 / 8
    paper = math.exp(start * end / ((1 - share) * end + share * start))
    assert beta3_at(3, 0.9, 0.9999, 8) == pytest.approx(paper, rel=1e-14)


def test_ademamix_warms_up_both() -> None:
    twin = AdEMAMix(lr=1.0, betas=(0.5, 0.5, 0.9), alpha=8.0, alpha_warmup=4, beta3_warmup=2, eps=0.0)
    beta3 = beta3_at(1, 0.5, 0.9, 2)
    p = twin.step(numbers(0.0), numbers(1.0))
    assert p == pytest.approx(-(1 + 2 * (1 - beta3)))
    q = twin.step(p, numbers(1.0))
    assert q == pytest.approx(p - (1 + 4 * (0.9 * (1 - beta3) + 0.1)))


# Both


@pytest.mark.parametrize("kind", [Adopt, AdEMAMix])
def test_factors_of_squares_of_rank_one_are_exact(kind: type[Adopt] | type[AdEMAMix]) -> None:
    magnitude = np.outer(np.exp(noise(0, 4)), np.exp(noise(1, 6)))
    gradients = [size * magnitude * np.sign(noise(seed, 4, 6)) for seed, size in enumerate((1.0, 0.3, 2.0, 0.5))]
    whole, factored = (run(kind(lr=0.1, factored=flag), np.ones((4, 6)), gradients) for flag in (False, True))
    np.testing.assert_allclose(factored, whole, rtol=1e-12)


@pytest.mark.parametrize("kind", [Adopt, AdEMAMix])
@pytest.mark.parametrize("factored", [False, True])
def test_zero_gradients_only_decay(kind: type[Adopt] | type[AdEMAMix], factored: bool) -> None:
    p = run(kind(lr=0.1, weight_decay=0.5, factored=factored), np.ones((2, 3)), [np.zeros((2, 3))] * 3)
    np.testing.assert_allclose(p, 0.95 ** (2 if kind is Adopt else 3), rtol=1e-12)


@pytest.mark.parametrize("twin", [Adopt, AdEMAMix, Muon])
def test_ascent_is_descent_on_the_negative(twin: type[Adopt] | type[AdEMAMix] | type[Muon]) -> None:
    gradients = [noise(seed, 3, 4) for seed in range(3)]
    up = run(twin(maximize=True), np.ones((3, 4)), gradients)
    np.testing.assert_array_equal(up, run(twin(), np.ones((3, 4)), [-g for g in gradients]))


# Muon


def by_singular_values(u: Array, steps: int = 5) -> Array:
    """What Newton-Schulz computes: its polynomial acts on each singular value alone."""
    left, values, right = np.linalg.svd(u, full_matrices=False)
    values = values / np.sqrt((values**2).sum())
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return np.asarray((left * values) @ right)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1), (1, 1)])
def test_newton_schulz_acts_on_singular_values(shape: tuple[int, int]) -> None:
    u = noise(3, *shape)
    np.testing.assert_allclose(orthogonalized(u), by_singular_values(u), atol=1e-12)
    np.testing.assert_allclose(orthogonalized(u, steps=0), u / np.linalg.norm(u), rtol=1e-14)


def test_newton_schulz_of_nothing_is_nothing() -> None:
    assert not orthogonalized(np.zeros((3, 2))).any()
    # A norm below eps is not divided by.
    tiny = np.full((1, 1), 1e-9)
    assert orthogonalized(tiny, steps=0) == pytest.approx(1e-2)


def test_factors_of_the_learning_rate() -> None:
    assert [factor_of((8, 2), None), factor_of((8, 2), "original"), factor_of((2, 8), "original")] == [2, 2, 1]
    assert factor_of((16, 4), "match_rms_adamw") == factor_of((4, 16), "match_rms_adamw") == pytest.approx(0.8)


def test_muon_by_hand() -> None:
    """With one entry and no steps of Newton-Schulz the direction is the sign."""
    twin = Muon(lr=0.1, weight_decay=0.5, momentum=0.75, ns_steps=0)
    p = twin.step(np.ones((1, 1)), np.full((1, 1), 4.0))
    assert [*twin.m.flat, *p.flat] == pytest.approx([1.0, 0.95 - 0.1])
    p = twin.step(p, np.full((1, 1), -2.0))  # m = 0.25, and 0.75 * 0.25 - 0.25 * 2 < 0
    assert [*twin.m.flat, *p.flat] == pytest.approx([0.25, 0.85 * 0.95 + 0.1])


OPTIONS = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "original", "momentum": 0.8},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
]


def theirs(p: Array, gradients: list[Array], **options: object) -> Array:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    param = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = torch.optim.Muon([param], lr=0.1, **options)  # type: ignore[arg-type]
    for g in gradients:
        param.grad = torch.from_numpy(g)
        optimizer.step()  # type: ignore[no-untyped-call]
    return param.detach().numpy()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_muon_is_torchs_but_for_its_bf16(shape: tuple[int, int], options: dict[str, object]) -> None:
    p, gradients = noise(0, *shape), [noise(seed, *shape) for seed in range(1, 5)]
    ours = run(Muon(lr=0.1, **options), p, gradients)  # type: ignore[arg-type]
    torchs = theirs(p, gradients, **options)
    assert np.linalg.norm(ours - torchs) < 0.03 * np.linalg.norm(ours - p)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_muon_is_torchs_around_an_exact_newton_schulz(
    shape: tuple[int, int], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    muon = pytest.importorskip("torch.optim._muon")
    p, gradients = noise(0, *shape), [noise(seed, *shape) for seed in range(1, 5)]
    monkeypatch.setattr(
        muon, "_zeropower_via_newtonschulz", lambda u, *_: torch.from_numpy(by_singular_values(u.numpy()))
    )
    ours = run(Muon(lr=0.1, **options), p, gradients)  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, theirs(p, gradients, **options), rtol=1e-10, atol=1e-12)
