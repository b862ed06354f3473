"""What a training run is: every choice in one frozen record that a JSON file can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from daypack.lab.models import model_config
from daypack.lab.parallel import KINDS
from daypack.lab.tasks import kind

#: The largest count of anything, and of threads: above that they are a slip of the keyboard.
MOST, MOST_THREADS = 2**31 - 1, 1024


def dtypes() -> dict[str, torch.dtype]:
    """Dtypes a model can be trained in; float16 would need loss scaling."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class TrainConfig:
    """One run. Configs that differ in the optimizer only train one model, from the same start, on the same batches.

    Attributes:
        optimizer: a name that `daypack.create` knows.
        options: further keyword arguments of that optimizer, JSON values only, such as `{"second_moment": "blocks"}`.
        lr: peak learning rate.
        weight_decay: decay of matrices; norms and other vectors are never decayed.
        model: size of the task's model, one of `daypack.lab.tasks.Kind.models`.
        seed: of the initial weights and of the batches.
        steps: optimizer steps.
        batch: windows or images per step; a graph is always trained whole.
        context: text only: predicted bytes per window.
        warmup: steps of linear rise to `lr`; never more than half of `steps`.
        final_lr: learning rate that the cosine ends on, as a fraction of `lr`.
        clip: largest norm of the whole gradient; None for no clipping.
        eval_every: steps between evaluations; the last step is always evaluated. None: a tenth of `steps`.
        eval_tokens: text only: held-out bytes predicted per evaluation, the same ones each time. Others predict all.
        device: a torch device.
        dtype: "float32", "bfloat16" or "float64", for parameters, gradients and arithmetic.
        threads: CPU threads, which the last bits of a result depend on; None leaves torch's setting.
        data: text only: file or folder; None for the standard library's sources.
        parallel: "none", or how several processes share the run: "ddp" or "fsdp2". Each takes its part of every batch.
            Text only.
        task: "text" (the next byte), "images" (handwritten digits) or "graph" (the factions of a club).
    """

    optimizer: str = "gefen"
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 3e-3
    weight_decay: float = 0.1
    model: str = "small"
    seed: int = 0
    steps: int = 400
    batch: int = 16
    context: int = 128
    warmup: int = 50
    final_lr: float = 0.0
    clip: float | None = 1.0
    eval_every: int | None = None
    eval_tokens: int = 65_536
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    data: str | None = None
    parallel: str = "none"
    task: str = "text"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "eval_tokens", "eval_every", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value is not None and value > (MOST_THREADS if name == "threads" else MOST):
                raise ValueError(f"{name} must be at most {MOST_THREADS if name == 'threads' else MOST}, got {value}")
        for name in ("lr", "weight_decay", "warmup", "final_lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in 0 .. 2**63 - 1, got {self.seed}")
        if self.parallel not in KINDS:
            raise ValueError(f"unknown parallel {self.parallel!r}; choose one of {', '.join(KINDS)}")
        if self.dtype not in dtypes():
            raise ValueError(f"unknown dtype {self.dtype!r}; choose one of {', '.join(dtypes())}")
        sizes = kind(self.task).models
        if self.model not in sizes:
            raise ValueError(f"unknown model {self.model!r}; choose one of {', '.join(sizes)} (task {self.task!r})")
        if self.task != "text" and self.parallel != "none":
            raise ValueError(f"parallel {self.parallel!r} is for the text task; train {self.task!r} on one process")
        if self.task != "text" and self.data is not None:
            raise ValueError(f"data is for the text task; task {self.task!r} has its own, so leave --data out")

    @property
    def label(self) -> str:
        """The optimizer and its options, for tables and curves: runs that differ in the seed only share it."""
        chosen = ", ".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        return f"{self.optimizer} ({chosen})" if chosen else self.optimizer

    def evaluates_after(self, step: int) -> bool:
        """Whether the loss on held-out data is measured once `step` steps are done."""
        every = self.eval_every or max(1, self.steps // 10)
        return step == self.steps or step % every == 0

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up that a run of this length really has."""
        return min(self.warmup, self.steps // 2)

    def learning_rate(self, step: int) -> float:
        """Learning rate of step number `step`, counted from 0: linear warm-up, then a cosine to `final_lr * lr`."""
        warmup = self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step + 1 - warmup) / max(1, self.steps - warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * done)) / 2)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a name that is no field, or a value out of its range.
        """
        unknown = set(values) - {entry.name for entry in fields(cls)}
        if unknown:
            raise ValueError(f"unknown training options {sorted(unknown)}; written by another version of daypack?")
        return cls(**values)


def with_threads(config: TrainConfig) -> TrainConfig:
    """`config` with a number of threads if it names none, since the last bits of a result depend on it.

    One for a small model: a second gains it little, and where other work wants the cores, waiting for each other costs
    two threads ten times what they save. A larger model gets torch's present setting.
    """
    small = config.task != "text" or model_config(config.model).hidden < 256
    return replace(config, threads=config.threads or (1 if small else torch.get_num_threads()))
