"""Final validation loss of AdamW, Gefen and its ablations on one task: what the default rests on.

Cells (variant x model x learning rate x seed) are appended to a JSON-lines file as they finish, and cells found there
are not run again, so that a stopped run continues where it was:

    python benchmarks/quality.py screen          # every variant, the tiny model, few seeds
    python benchmarks/quality.py confirm         # AdamW against the default, many seeds
    python benchmarks/quality.py report          # tables, in Markdown

All cells of one model and seed start from the same weights and see the same batches; gaps are paired by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import daypack
from daypack.formats.base import ComponentSpec
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.formats.factored import Factored
from daypack.geometry import Geometry
from daypack.lab.config import TrainConfig
from daypack.lab.loop import run
from daypack.lab.text import TextTask
from daypack.optim import registry
from daypack.param import ParamPlan
from daypack.rules.adamw import ADAMW, adamw
from daypack.rules.base import Elements, Rule

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
BASELINE = "adamw"
#: AdamW's best learning rate by `python benchmarks/quality.py rates`, per model.
RATE = {"tiny": 4e-3, "small": 4e-3}
STEPS = 1500


class WideScale(BlockQuantized):
    """Scales in fp32, exact, instead of bf16 rounded up."""

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        return tuple(
            replace(spec, dtype=torch.float32) if spec.dtype == torch.bfloat16 else spec
            for spec in super().components(view, dtype)
        )


def bounded(x: Elements) -> Tensor:
    """AdamW's direction, each element within the bound that AdamW itself keeps: (1 - b1) / sqrt(1 - b2)."""
    limit = (1 - x.hyper.beta1) / math.sqrt(1 - x.hyper.beta2)
    return adamw(x).clamp_(-limit, limit)


def clipped(x: Elements) -> Tensor:
    """AdamW's direction scaled down to a root mean square of 1, as Adafactor does."""
    return adamw(x).div_(max(1.0, x.norms.measured / x.norms.numel**0.5))


BOUNDED = replace(ADAMW, name="bounded", direction=bounded)
CLIPPED = replace(ADAMW, name="clipped", direction=clipped, measured=adamw)


@dataclass(frozen=True)
class Variant:
    """An ablation: how matrices are stored and stepped. Vectors are dense in all of them."""

    plan: ParamPlan | None  # None: the registered optimizer of this name, as it is
    about: str
    dense_embedding: bool = False


def variants() -> dict[str, Variant]:
    coded, factored, dense = BlockQuantized(), Factored(), Dense()

    def of(m: Any, v: Any, about: str, rule: Rule = ADAMW, **kwargs: Any) -> Variant:
        return Variant(ParamPlan(rule, (m, v)), about, **kwargs)

    return {
        "adamw": Variant(None, "torch.optim.AdamW"),
        "gefen": Variant(None, "the default"),
        "blocks": of(coded, BlockMean(), "second moment per block"),
        "m dense": of(dense, factored, "factored v alone, m in fp32"),
        "v dense": of(coded, dense, "8-bit m alone, v in fp32"),
        "nearest": of(BlockQuantized(rounding="nearest"), factored, "codes rounded to nearest"),
        "v dense, nearest": of(BlockQuantized(rounding="nearest"), dense, "8-bit m alone, rounded to nearest"),
        "block 64": of(BlockQuantized(64), factored, "scale per 64 elements"),
        "block 128": of(BlockQuantized(128), factored, "scale per 128 elements"),
        "fp32 scale": of(WideScale(), factored, "scales in fp32"),
        "bounded": of(coded, factored, "update within AdamW's bound", rule=BOUNDED),
        "clipped": of(coded, factored, "update's RMS clipped to 1", rule=CLIPPED),
        "dense embedding": of(coded, factored, "embedding keeps a dense v", dense_embedding=True),
    }


class Ablation(daypack.Gefen):
    """Gefen with another plan for its matrices."""

    variant: Variant

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: dict[str, Any], name: str) -> ParamPlan:
        usual = super().plan(shape, dtype, group, name)
        if isinstance(usual.formats[0], Dense):
            return usual
        assert self.variant.plan is not None
        if self.variant.dense_embedding and group.get("embedding"):
            return ParamPlan(usual.rule, (usual.formats[0], Dense()))
        return self.variant.plan


def register() -> None:
    """Make every ablation known to the training loop by its name."""
    for name, variant in variants().items():
        if variant.plan is not None:
            registry.REGISTRY[name] = type("Ablation", (Ablation,), {"variant": variant})


@dataclass(frozen=True)
class Cell:
    variant: str
    model: str
    lr: float
    seed: int

    def config(self) -> TrainConfig:
        return TrainConfig(
            optimizer=self.variant,
            model=self.model,
            lr=self.lr,
            seed=self.seed,
            steps=STEPS,
            eval_every=STEPS // 3,
            eval_tokens=262_144,
            threads=1,
        )


def load_results() -> dict[Cell, dict[str, Any]]:
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {Cell(**row["cell"]): row for row in rows}


def run_cells(cells: list[Cell]) -> None:
    register()
    task = TextTask.load(TrainConfig())
    for cell in cells:
        if cell in load_results():  # read anew each time: another process may be filling the same file
            continue
        result = run(cell.config(), task)
        row = {
            "cell": cell.__dict__,
            "loss": result.validation_loss,
            "curve": result.validation_curve,
            "bytes_per_param": result.bytes_per_param,
            "optimizer_ms": result.optimizer_ms,
            "seconds": result.seconds,
            "versions": f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}",
        }
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{cell}: {result.validation_loss:.4f} in {result.seconds:.0f} s", flush=True)


def screen(seeds: int) -> list[Cell]:
    rate = RATE["tiny"]
    return [Cell(name, "tiny", lr, seed) for lr in (rate, 2 * rate) for seed in range(seeds) for name in variants()]


def confirm(model: str, seeds: int) -> list[Cell]:
    return [Cell(name, model, RATE[model], seed) for seed in range(seeds) for name in (BASELINE, "gefen")]


def rates(model: str) -> list[Cell]:
    """AdamW over learning rates: which one is its own."""
    return [Cell(BASELINE, model, lr, 0) for lr in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)]


def report() -> Iterator[str]:
    """Markdown tables of everything that was run: mean loss, and gap to AdamW paired by seed, with standard errors."""
    groups: dict[tuple[str, float], dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for cell, row in load_results().items():
        groups[cell.model, cell.lr][cell.variant][cell.seed] = row
    about = {name: variant.about for name, variant in variants().items()}
    for (model, lr), by_variant in sorted(groups.items()):
        yield f"\n**{model}, lr {lr:g}**\n"
        yield "| variant | | B/param | loss, nats/byte | gap to AdamW | seeds |"
        yield "|---|---|---|---|---|---|"
        base = by_variant.get(BASELINE, {})
        for name in sorted(by_variant, key=list(about).index):
            rows = by_variant[name]
            gaps = [row["loss"] - base[seed]["loss"] for seed, row in rows.items() if seed in base]
            yield (
                f"| {name} | {about[name]} | {next(iter(rows.values()))['bytes_per_param']:.3f} | "
                f"{mean_error([row['loss'] for row in rows.values()])} | "
                f"{'' if name == BASELINE else mean_error(gaps, sign='+')} | {len(rows)} |"
            )


def mean_error(values: list[float], sign: str = "") -> str:
    """Mean and standard error of the mean."""
    if not values:
        return "-"
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "screen", "confirm", "report"])
    parser.add_argument("--model", choices=list(RATE), default="small", help="for rates and confirm")
    parser.add_argument("--seeds", type=int, help="default: 2 for screen, 10 for confirm")
    args = parser.parse_args()
    if args.what == "report":
        print("\n".join(report()))
    elif args.what == "rates":
        run_cells(rates(args.model))
    elif args.what == "screen":
        run_cells(screen(args.seeds or 2))
    else:
        run_cells(confirm(args.model, args.seeds or 10))


if __name__ == "__main__":
    main()
