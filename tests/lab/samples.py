"""Results of runs that never happened."""

from __future__ import annotations

from collections.abc import Sequence

from daypack.lab import Record, RunResult
from daypack.lab.page import Provenance
from tests.lab.texts import config


def result(optimizer: str, seed: int, losses: Sequence[float], state_bytes: int = 8000) -> RunResult:
    """A run that validates after each of its steps."""
    records = tuple(
        Record(step, loss + 0.1, 1e-3, 1.0, 2.0, float(step), loss) for step, loss in enumerate(losses, start=1)
    )
    settings = config(optimizer=optimizer, seed=seed, steps=len(losses), eval_every=1)
    return RunResult(
        settings, records, parameters=1000, state_bytes=state_bytes, weight_bytes=4000, gradient_bytes=4000
    )


def comparison(gap: float = 0.0, seeds: int = 3) -> list[RunResult]:
    """AdamW against Gefen, `gap` above it but for a spread of 0.002 over seeds."""
    results = []
    for seed in range(seeds):
        base = [3.0 + 0.1 * seed, 2.0 + 0.1 * seed]
        results.append(result("adamw", seed, base))
        results.append(result("gefen", seed, [loss + gap + 0.002 * (seed - 1) for loss in base], 1050))
    return results


PROVENANCE = Provenance(
    name="a <b> & c",
    command="daypack compare --data 'a & b' --name x",
    source="<script>alert(1)</script>",
    fingerprint="0123456789abcdef",
    versions={"torch": "2.13.0", "threads": "1"},
)
