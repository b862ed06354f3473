"""A wider, deeper model with a larger vocabulary goes on from a half-trained one: its state transplanted, or fresh.

    python benchmarks/transplant.py run       # cells (optimizer x kind x seed) that results/transplant.jsonl lacks
    python benchmarks/transplant.py report    # a table in Markdown

The tiny model after 750 steps grows from 2 to 3 layers, its MLPs from 176 to 264, its vocabulary from 256 to 272. New
branches end in zeros, so that the new model begins with the old one's function (but for the new rows of the head). All
kinds of a seed go on from the same weights on the same batches for 200 steps at the old job's learning rates.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from torch import nn

import daypack
from cells import CUT, RESULTS, SEEDS, gaps, half_trained, pick, proceed, read, run_cells, show
from daypack.checkpoint import Rewarm
from daypack.checkpoint.growth import grow
from daypack.training.corpus import load_corpus
from daypack.training.loop import build_optimizer, thread_count
from daypack.training.models import build_model, model_config

PATH = RESULTS / "transplant.jsonl"
OPTIMIZERS = ("adamw", "gefen")
KINDS = ("transplanted", "fresh state", "fresh state, Rewarm")
LENGTH = 200
WINDOWS = ((1, 5), (6, 20), (21, 50), (51, 100), (101, 200))


@torch.no_grad()
def grown(old: nn.Module, seed: int) -> Any:
    """The larger model with the old one's weights in the corners of its own."""
    model = build_model(model_config("tiny", layers=3, mlp_hidden=264, vocabulary=272), seed + 100)
    before = dict(old.named_parameters())
    for name, p in model.named_parameters():
        ends = name.endswith(("o_proj.weight", "down_proj.weight"))
        if name in before:
            kept = tuple(map(slice, before[name].shape))
            new = grow(before[name], tuple(p.shape))
            if not ends:  # new inputs of a branch's last layer start at 0
                mask = torch.ones_like(p, dtype=torch.bool)
                mask[kept] = False
                new[mask] = p[mask]
            p.copy_(new)
        elif ends:
            p.zero_()
    return model


def cell(optimizer: str, kind: str, seed: int) -> dict[str, Any]:
    corpus = load_corpus()
    with thread_count(1):
        job = half_trained(optimizer, seed, corpus)
        old = job.optimizer
        job.model = grown(job.model, seed)
        job.optimizer = build_optimizer(job.config, job.model)
        if kind == "transplanted":
            daypack.transplant(old, job.optimizer)
        elif kind.endswith("Rewarm"):
            Rewarm(job.optimizer, 10, 50)
        return proceed(job, LENGTH)


def report() -> None:
    cells = read(PATH)
    heads = " | ".join(f"steps {first} - {last}" for first, last in WINDOWS)
    print(f"| optimizer | | {heads} | validation at {CUT + LENGTH} |")
    print("|---|---|---|" + "---|" * len(WINDOWS))
    for optimizer in OPTIMIZERS:
        base = pick(cells, optimizer=optimizer, kind=KINDS[0])
        for kind in KINDS:
            mine = pick(cells, optimizer=optimizer, kind=kind)
            shown = ["" if kind == KINDS[0] else show(gaps(mine, base, *window)) for window in WINDOWS]
            loss = statistics.fmean(each["validation"][str(CUT + LENGTH)] for each in mine)
            print(f"| {optimizer} | {kind} | {' | '.join(shown)} | {loss:.4f} |")


if __name__ == "__main__":
    if sys.argv[1:] == ["report"]:
        report()
    else:
        run_cells(
            PATH, [{"optimizer": o, "kind": k, "seed": s} for s in SEEDS for o in OPTIMIZERS for k in KINDS], cell
        )
