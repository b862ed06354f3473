"""What a training run is: every choice in one frozen record that a JSON file can hold.

`TrainConfig` is also the table of the options of `daypack compare` and `daypack train`: the command line, the checks of
values, what a resumed run may change and the settings in the report are made from its fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

import daypack
from daypack.lab.models import model_config
from daypack.lab.options import TRAIN, count, not_negative, one_of, option, option_of, seed_number
from daypack.lab.parallel import PARALLEL
from daypack.lab.tasks import TASKS, task_info


def dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that a model can be trained in; float16 would need loss scaling."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. Configs that differ in the optimizer only train one model, from the same start, on the same batches.

    The help of each field says what it is. Fields stand in the order of the help texts and of the report's settings.
    """

    task: str = option(
        "text",
        "What is trained: text (a transformer, the next byte), images (a convolutional network, handwritten digits) or "
        "graph (graph convolutions, the factions of a club). The last two need daypack[tasks].",
        check=one_of([*TASKS]),
        row=("task", lambda runs: str(runs[0].task)),
    )
    optimizer: str = option(
        "gefen",
        f"One of {', '.join(daypack.names())}.",
        commands=(TRAIN,),
        row=("optimizers", lambda runs: ", ".join({f"{run.label} at {run.lr:g}": None for run in runs})),
    )
    options: Mapping[str, Any] = option(
        {},
        'Further keyword arguments of the optimizer, JSON values only, such as {"second_moment": "blocks"}.',
        commands=(),
    )
    lr: float = option(3e-3, "Peak learning rate.", commands=(TRAIN,), check=not_negative)
    model: str = option(
        "small",
        "Size of the model. " + "; ".join(f"{name}: {', '.join(info.models)}" for name, info in TASKS.items()) + ".",
        row=("model", lambda runs: str(runs[0].model)),
    )
    steps: int = option(400, "Optimizer steps.", check=count(), row=("steps", lambda runs: f"{runs[0].steps:,}"))
    batch: int = option(
        16,
        "Windows or images per step; a graph is trained whole.",
        check=count(),
        row=("batch", lambda runs: task_info(runs[0].task).batch(runs[0])),
    )
    context: int = option(128, "Bytes per window (text only).", check=count())
    warmup: int = option(
        50,
        "Steps of linear rise to the peak learning rate; never more than half of all steps.",
        commands=(),
        check=not_negative,
        row=(
            "schedule",
            lambda runs: f"{runs[0].warmup_steps} steps of warm-up, then cosine to {runs[0].final_lr:g} of the peak",
        ),
    )
    final_lr: float = option(
        0.0, "Learning rate that the cosine ends on, as a fraction of the peak.", commands=(), check=not_negative
    )
    weight_decay: float = option(
        0.1,
        "Weight decay of matrices.",
        check=not_negative,
        row=("weight decay", lambda runs: f"{runs[0].weight_decay:g} on matrices"),
    )
    clip: float | None = option(
        1.0,
        "Largest norm of the whole gradient; None for no clipping.",
        commands=(),
        check=not_negative,
        row=("gradient clipping", lambda runs: "none" if runs[0].clip is None else f"at norm {runs[0].clip:g}"),
    )
    eval_every: int | None = option(
        None,
        "Steps between evaluations on held-out data.",
        words="a tenth of the steps",
        check=count(),
        may_differ=True,
    )
    eval_tokens: int = option(
        65_536,
        "Held-out bytes predicted per evaluation, the same ones each time (text only; other tasks predict all).",
        commands=(),
        check=count(),
        row=("evaluation", lambda runs: task_info(runs[0].task).held_out(runs[0])),
    )
    seed: int = option(
        0,
        "Of the initial weights and the batches.",
        commands=(TRAIN,),
        check=seed_number,
        row=("seeds", lambda runs: ", ".join(map(str, sorted({run.seed for run in runs})))),
    )
    device: str = option(
        "cpu",
        "Torch device, such as cpu or cuda.",
        may_differ=True,
        row=("device, dtype", lambda runs: f"{runs[0].device}, {runs[0].dtype}"),
    )
    dtype: str = option("float32", f"Of weights and arithmetic: {', '.join(dtypes())}.", check=one_of([*dtypes()]))
    # The last bits of a result depend on it.
    threads: int | None = option(
        None, "CPU threads.", words="1 for small models, else torch's choice", check=count(1024), may_differ=True
    )
    data: str | None = option(
        None,
        "Text file or folder to train on (text only).",
        words="the Python standard library's sources",
        may_differ=True,
    )
    parallel: str = option(
        "none",
        "How the processes that torchrun started share the run: none, ddp or fsdp2 (text only).",
        check=one_of(PARALLEL),
        may_differ=True,
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, check = getattr(self, entry.name), option_of(entry).check
            if value is not None and check is not None:
                check(entry.name, value)
        sizes = task_info(self.task).models
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
        """Say whether the loss on held-out data is measured once `step` steps are done."""
        every = self.eval_every or max(1, self.steps // 10)
        return step == self.steps or step % every == 0

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up that a run of this length really has."""
        return min(self.warmup, self.steps // 2)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step`, from 0: linear warm-up, then a cosine to `final_lr * lr`."""
        warmup = self.warmup_steps
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step + 1 - warmup) / max(1, self.steps - warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * done)) / 2)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build a config from what `to_dict` returned.

        Raises:
            ValueError: a name that is no field, or a value out of its range.
        """
        unknown = set(values) - {entry.name for entry in fields(cls)}
        if unknown:
            raise ValueError(f"unknown training options {sorted(unknown)}; written by another version of daypack?")
        return cls(**values)


def with_threads(config: TrainConfig) -> TrainConfig:
    """Fill in the number of threads if `config` names none, since the last bits of a result depend on it.

    One for a small model: a second gains it little, and where other work wants the cores, waiting for each other costs
    two threads ten times what they save. A larger model gets torch's present setting.
    """
    small = config.task != "text" or model_config(config.model).hidden < 256
    return replace(config, threads=config.threads or (1 if small else torch.get_num_threads()))
