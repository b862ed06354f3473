from __future__ import annotations

import math

import pytest

from daypack.lab import summarise_runs
from daypack.lab.verdict import caveat, headline, ratio
from tests.lab.samples import comparison, result


@pytest.mark.parametrize(
    ("gap", "words"),
    [(0.0, "ends level with adamw"), (0.1, "ends 0.100 nats above adamw"), (-0.1, "ends 0.100 nats below adamw")],
)
def test_a_gap_counts_only_beyond_its_error(gap: float, words: str) -> None:
    assert headline(summarise_runs(comparison(gap))) == f"gefen {words}, with 7.6x less optimizer state"


def test_a_single_seed_must_beat_the_noise_of_equal_runs() -> None:
    assert "level" in headline(summarise_runs(comparison(0.02, seeds=1)))
    assert "0.048 nats above" in headline(summarise_runs(comparison(0.05, seeds=1)))
    assert "One seed" in caveat(summarise_runs(comparison(seeds=1)))
    assert "standard error" in caveat(summarise_runs(comparison(seeds=2)))


def test_a_short_comparison_says_that_it_is_short() -> None:
    assert "need not last" in caveat(summarise_runs(comparison()))
    long = [result(name, 0, [2.0] * 1500) for name in ("adamw", "gefen")]
    assert "need not last" not in caveat(summarise_runs(long))


def test_one_optimizer_and_a_diverged_one() -> None:
    assert headline(summarise_runs([result("adamw", 0, [2.0])])) == (
        "adamw ends at 2.000 nats per byte with 8.00 bytes of state per parameter"
    )
    diverged = summarise_runs([result("adamw", 0, [2.0]), result("sgd", 0, [math.nan], 0)])
    assert headline(diverged) == "sgd diverges, with no optimizer state"


def test_ratios() -> None:
    assert [ratio(1.0, 8.0), ratio(8.0, 8.0), ratio(8.0, 4.0), ratio(0.0, 8.0), ratio(8.0, 0.0)] == [
        "8.0x less",
        "the same",
        "2.0x more",
        "none",
        "more",
    ]
