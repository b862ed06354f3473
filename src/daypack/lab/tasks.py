"""The tasks that optimizers are compared on: what is trained, on what, and how its result is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from daypack.lab import graph, images, models
from daypack.lab.classifier import Classifier
from daypack.lab.graph import GraphTask
from daypack.lab.images import ImageTask
from daypack.lab.text import TextTask

if TYPE_CHECKING:
    from daypack.lab.config import TrainConfig


class Task(Protocol):
    """Data, read into memory, and the model for it. Loss and accuracy follow from the model (`Classifier`)."""

    @property
    def source(self) -> str:
        """What the data is, for people."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the data."""

    @property
    def about(self) -> str:
        """Source and size in one line."""

    def model(self, config: TrainConfig) -> Classifier:
        """Build the model that `config` names, on the CPU in fp32, its weights a function of the seed alone.

        Raises:
            ValueError: the data does not do for this config.
        """

    def batch(self, config: TrainConfig, step: int) -> Tensor:
        """Return what step `step`, counted from 0, trains on: a function of the arguments alone."""

    def held_out(self, config: TrainConfig) -> Iterator[Tensor]:
        """Yield the batches that an evaluation predicts: the same ones at every call, none of them trained on."""


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a task before its data is read.

    Attributes:
        load: reads the data.
        models: sizes of its model, smallest first.
        unit: what one prediction is about.
        batch: what a step sees, for people.
        held_out: what an evaluation sees, for people.
        remedy: what to do where a checkpoint was trained on other data.
    """

    load: Callable[[TrainConfig], Task]
    models: tuple[str, ...]
    unit: str
    batch: Callable[[TrainConfig], str]
    held_out: Callable[[TrainConfig], str]
    remedy: str = "install the version of its package that was used then"


TASKS: dict[str, TaskInfo] = {
    "text": TaskInfo(
        TextTask.load,
        tuple(models.presets()),
        "byte",
        lambda config: f"{config.batch} windows of {config.context} bytes",
        lambda config: f"{config.eval_tokens:,} held-out bytes at most, the same ones each time",
        "give the same text with --data (the standard library's sources differ between Python versions)",
    ),
    "images": TaskInfo(
        ImageTask.load,
        tuple(images.presets()),
        "image",
        lambda config: f"{config.batch} images",
        lambda config: "all held-out images: the last fifth",
    ),
    "graph": TaskInfo(
        GraphTask.load,
        tuple(graph.presets()),
        "node",
        lambda config: f"the {graph.CLASSES * graph.LABELLED} labelled nodes, chosen by the seed",
        lambda config: "all other nodes",
    ),
}


def task_info(task: str) -> TaskInfo:
    """Return what is known of a task before its data is read.

    Raises:
        ValueError: there is none.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose one of {', '.join(TASKS)}")
    return TASKS[task]


def load_task(config: TrainConfig) -> Task:
    """Read the data of the task that `config` names.

    Raises:
        ValueError: it is not there, or the package that ships it is not.
    """
    return task_info(config.task).load(config)
