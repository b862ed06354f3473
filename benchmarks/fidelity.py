"""How far Gefen's updates are from AdamW's on the same gradients, without the noise of training runs.

One model is trained by AdamW. Every variant sees the same parameters and gradients at every step, and its update u is
compared with AdamW's: cosine, and relative error |u - u_adamw| / |u_adamw|, means over steps, per kind of parameter.

    python benchmarks/fidelity.py [--model tiny] [--steps 300]
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch import Tensor

import daypack
from daypack.lab.config import TrainConfig
from daypack.lab.loop import Job
from daypack.optim.registry import REGISTRY
from quality import Ablation, register, variants

SKIPPED = 20  # first steps, in which every optimizer's step is nearly the sign of the gradient


def kind(name: str) -> str:
    """The last module's name: "q_proj", "embedding", "norm"."""
    parts = name.split(".")
    return "norm" if "norm" in name else parts[-2]


class Shadow:
    """An optimizer that steps copies of the parameters, put back to AdamW's values before every step."""

    def __init__(self, name: str, config: TrainConfig, job: Job) -> None:
        self.params = [torch.nn.Parameter(p.detach().clone()) for p in job.model.parameters()]
        self.optimizer = daypack.create(name, self.params, lr=config.lr, weight_decay=0.0)
        if isinstance(self.optimizer, Ablation):  # its groups are not marked; the embedding is the first parameter
            first, *rest = self.params
            self.optimizer = REGISTRY[name](
                [{"params": [first], "embedding": True}, {"params": rest, "embedding": False}],
                lr=config.lr, weight_decay=0.0,
            )  # fmt: skip

    def update(self, values: list[Tensor], grads: list[Tensor], lr: float) -> list[Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            for p, value, grad in zip(self.params, values, grads, strict=True):
                p.copy_(value)
                p.grad = grad
        self.optimizer.step()
        return [p.detach() - value for p, value in zip(self.params, values, strict=True)]


def measure(config: TrainConfig) -> dict[str, dict[str, tuple[float, float]]]:
    """Cosine and relative error by variant and kind of parameter."""
    register()
    job = Job(config)
    names = [name for name, _ in job.model.named_parameters()]
    shadows = {name: Shadow(name, config, job) for name in ("adamw", *(n for n in variants() if n != "adamw"))}
    totals: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    while job.step < config.steps:
        values = [p.detach().clone() for p in job.model.parameters()]
        lr = job.advance().lr
        grads = [p.grad.clone() for p in job.model.parameters() if p.grad is not None]
        exact = shadows["adamw"].update(values, grads, lr)
        for variant, shadow in shadows.items():
            if variant == "adamw":
                continue
            for name, u, reference in zip(names, shadow.update(values, grads, lr), exact, strict=True):
                if job.step > SKIPPED and lr > 0:
                    cosine = torch.cosine_similarity(u.flatten(), reference.flatten(), dim=0)
                    error = (u - reference).norm() / reference.norm()
                    totals[variant][kind(name)].append((float(cosine), float(error)))
    return {
        variant: {
            key: (sum(c for c, _ in pairs) / len(pairs), sum(e for _, e in pairs) / len(pairs))
            for key, pairs in kinds.items()
        }
        for variant, kinds in totals.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    config = TrainConfig(
        optimizer="adamw", model=args.model, lr=4e-3, steps=args.steps, eval_every=args.steps, threads=1
    )
    table = measure(config)
    kinds = list(next(iter(table.values())))
    print(f"| variant | {' | '.join(kinds)} |")
    print("|---" * (len(kinds) + 1) + "|")
    for variant, row in table.items():
        print(f"| {variant} | {' | '.join(f'{row[key][0]:.4f} / {row[key][1]:.3f}' for key in kinds)} |")


if __name__ == "__main__":
    main()
