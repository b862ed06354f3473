"""A wider, deeper model with a larger vocabulary goes on from a half-trained one: its state transplanted, or fresh.

    python benchmarks/transplant.py run [ONLY]    # cells that results/transplant.jsonl lacks (of one optimizer)
    python benchmarks/transplant.py report        # a table in Markdown
    python benchmarks/transplant.py plot          # docs/transplant.png

The tiny model after 750 or 1,125 of 1,500 steps grows from 2 to 3 layers, its MLPs from 176 to 264, its vocabulary from
256 to 272. New branches end in zeros, so that the new model begins with the old one's function (but for the new rows of
the head). All kinds of a seed go on from the same weights on the same batches for 200 steps at the old job's learning
rates. "a step for each element" is AdamW with just that: kept elements go on exactly, new ones as in a fresh optimizer.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

import daypack
from cells import CUT, RESULTS, SEEDS, draw, exchange, gaps, half_trained, main, pick, proceed, read, run_cells, show
from daypack.checkpoint import Rewarm
from daypack.checkpoint.changed_model import grow
from daypack.lab.loop import thread_count
from daypack.lab.models import build_model, model_config

PATH = RESULTS / "transplant.jsonl"
FRESH, CARRIED, REWARM, EACH = "fresh state", "transplanted", "fresh state, Rewarm", "a step for each element"
KINDS = {"adamw": (CARRIED, FRESH, REWARM, EACH), "gefen": (CARRIED, FRESH, REWARM), "adam_mini": (CARRIED, FRESH)}
CUTS = (CUT, 1125)
LENGTH = 200
WINDOWS = ((1, 5), (6, 20), (21, 50), (51, 100), (101, 200), (1, 200))


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


class ElementAdamW(torch.optim.Optimizer):
    """AdamW with a step for each element."""

    def __init__(self, like: torch.optim.Optimizer) -> None:
        super().__init__(like.param_groups, like.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                for key in ("m", "v", "t") if not state else ():
                    state[key] = torch.zeros_like(p)
                m = state["m"].lerp_(p.grad, 1 - b1)
                v = state["v"].lerp_(p.grad.square(), 1 - b2)
                t = state["t"].add_(1).double()
                m, v = m / (1 - b1**t), v / (1 - b2**t)
                p.mul_(1 - lr * group["weight_decay"]).sub_((lr * m / (v.sqrt() + group["eps"])).float())

    def carry(self, old: torch.optim.Optimizer, before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> None:
        for name, p in before.items():
            state, shape = old.state[p], tuple(now[name].shape)
            t = torch.full_like(p, float(state["step"]))
            tensors = {"m": state["exp_avg"], "v": state["exp_avg_sq"], "t": t}
            self.state[now[name]] = {key: grow(value, shape) for key, value in tensors.items()}


def cell(optimizer: str, kind: str, seed: int, cut: int) -> dict[str, Any]:
    with thread_count(1):
        job = half_trained(optimizer, seed, cut)
        old, before = job.optimizer, dict(job.model.named_parameters())
        exchange(job, grown(job.model, seed))
        if kind == CARRIED:
            daypack.transplant(old, job.optimizer)
        elif kind == REWARM:
            Rewarm(job.optimizer, 10, 50)
        elif kind == EACH:
            job.optimizer = ElementAdamW(job.optimizer)
            job.optimizer.carry(old, before, dict(job.model.named_parameters()))
        return proceed(job, LENGTH)


def keys() -> list[dict[str, Any]]:
    every = [
        {"optimizer": o, "kind": k, "seed": s, "cut": c} for s in SEEDS for c in CUTS for o in KINDS for k in KINDS[o]
    ]
    # The later growth is a check of the claim, not of every variant.
    return [
        key
        for key in every
        if key["cut"] == CUT or (key["kind"] in (CARRIED, FRESH) and key["optimizer"] != "adam_mini")
    ]


def report() -> None:
    cells = read(PATH)
    heads = " | ".join(f"{first} - {last}" for first, last in WINDOWS)
    print(f"| optimizer, grown at | | {heads} | last validation |")
    print("|---|---|" + "---|" * (len(WINDOWS) + 1))
    for cut in CUTS:
        for optimizer, kinds in KINDS.items():
            base = pick(cells, optimizer=optimizer, kind=FRESH, cut=cut)
            for kind in kinds:
                mine = pick(cells, optimizer=optimizer, kind=kind, cut=cut)
                if not mine:
                    continue
                shown = ["" if kind == FRESH else show(gaps(mine, base, *window)) for window in WINDOWS]
                loss = statistics.fmean(list(each["validation"].values())[-1] for each in mine)
                print(f"| {optimizer}, {cut} | {kind} | {' | '.join(shown)} | {loss:.4f} |")


def plot() -> None:
    cells = read(PATH)
    panels = {
        f"{optimizer}, grown at step {CUT}": {
            kind: (
                pick(cells, optimizer=optimizer, kind=kind, cut=CUT),
                pick(cells, optimizer=optimizer, kind=FRESH, cut=CUT),
            )
            for kind in kinds
            if kind != FRESH
        }
        for optimizer, kinds in KINDS.items()
    }
    draw("transplant.png", panels, "above a fresh state")


def measure(optimizers: list[str]) -> None:
    run_cells(PATH, [key for key in keys() if key["optimizer"] in (optimizers or KINDS)], cell)


if __name__ == "__main__":
    main(report, plot, measure)
