"""The step loop that the command line, the benchmarks and the tests share."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

import daypack
from daypack.lab.config import TrainConfig, dtypes
from daypack.lab.parallel import gathered, here
from daypack.lab.tasks import Task, load_task
from daypack.optim.size import tensor_bytes


@dataclass(frozen=True)
class Record:
    """What one step measured.

    Attributes:
        step: steps done, this one included.
        loss: training loss of this step's batch before its update, nats per prediction.
        lr: learning rate of this step.
        grad_norm: norm of the whole gradient before clipping; None without clipping.
        optimizer_ms: time inside `optimizer.step()`, milliseconds.
        seconds: time that training and evaluation have taken so far in this job.
        validation: loss on the held-out part after this step, nats per prediction; None if not measured here.
        accuracy: fraction of it that was predicted right; None if not measured here.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    optimizer_ms: float
    seconds: float
    validation: float | None
    accuracy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; a number that is not finite becomes None."""
        return {name: json_number(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Record":
        """Build a record from what `to_dict` returned; other entries are ignored.

        Raises:
            TypeError: `values` is no mapping, or a field is missing or of another type.
        """
        if not isinstance(values, Mapping) or not isinstance(values.get("step"), int):
            raise TypeError(f"not a record: {values!r}")
        known = {entry.name: values[entry.name] for entry in fields(cls) if entry.name in values}
        return cls(**{**known, "loss": math.nan if known.get("loss") is None else known["loss"]})


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        config: what was run.
        records: one per step.
        parameters: parameter elements.
        state_bytes: bytes of optimizer state on this rank, measured after the last step.
        weight_bytes: of parameters and buffers on this rank.
        gradient_bytes: of the gradients of the last step on this rank.
    """

    config: TrainConfig
    records: tuple[Record, ...]
    parameters: int
    state_bytes: int
    weight_bytes: int
    gradient_bytes: int

    @property
    def validation_loss(self) -> float:
        """Last validation loss, nats per prediction; NaN if the run diverged."""
        curve = self.validation_curve
        return curve[-1][1] if curve else math.nan

    @property
    def accuracy(self) -> float:
        """Fraction of the held-out part that was predicted right at the end; NaN if the run did not get there."""
        found = [record.accuracy for record in self.records if record.accuracy is not None]
        return found[-1] if found else math.nan

    @property
    def validation_curve(self) -> list[tuple[int, float]]:
        """Pairs of step and validation loss."""
        return [(record.step, record.validation) for record in self.records if record.validation is not None]

    @property
    def bytes_per_param(self) -> float:
        """Measured bytes of optimizer state per parameter element."""
        return self.state_bytes / self.parameters

    @property
    def optimizer_ms(self) -> float:
        """Median time inside `optimizer.step()`, milliseconds; the first step, which sets things up, is left out."""
        times = [record.optimizer_ms for record in self.records]
        return statistics.median(times[1:] or times)

    @property
    def first_step_ms(self) -> float:
        """Time of the first `optimizer.step()`, milliseconds."""
        return self.records[0].optimizer_ms

    @property
    def optimizer_share(self) -> float:
        """Fraction of the run's time, evaluations included, that went into `optimizer.step()`."""
        return sum(record.optimizer_ms for record in self.records) / 1e3 / self.seconds if self.seconds else 0.0

    @property
    def seconds(self) -> float:
        """Wall time of training and evaluation."""
        return self.records[-1].seconds

    def summary(self) -> dict[str, Any]:
        """Return config and outcome without the records, as JSON values."""
        return {
            "config": self.config.to_dict(),
            "validation_loss": json_number(self.validation_loss),
            "accuracy": json_number(self.accuracy),
            "bytes_per_param": self.bytes_per_param,
            "state_bytes": self.state_bytes,
            "weight_bytes": self.weight_bytes,
            "gradient_bytes": self.gradient_bytes,
            "parameters": self.parameters,
            "optimizer_ms": self.optimizer_ms,
            "first_step_ms": self.first_step_ms,
            "seconds": self.seconds,
        }


class Job:
    """A run in progress: model, optimizer and position. Between two records everything can be saved.

    Attributes:
        config: what is run.
        task: its data.
        model: the model being trained.
        optimizer: its optimizer.
        step: steps done.
        seconds: time that training and evaluation have taken.
    """

    def __init__(self, config: TrainConfig, task: Task | None = None) -> None:
        """Build model and optimizer.

        Args:
            config: what to run.
            task: the data, if it is loaded already; it must be what `config` names.

        Raises:
            ValueError: unknown optimizer, option or device, missing data, or too little of it.
        """
        self.config = config
        self.task = load_task(config) if task is None else task
        self.device = require_device(config.device)
        self.ranks = here(config.parallel)
        self.model = self.task.model(config).to(device=self.device, dtype=dtypes()[config.dtype])
        self._loss = self.ranks.wrap(self.model)
        self.optimizer = build_optimizer(config, self.model)
        self.step = 0
        self.seconds = 0.0

    def train(self) -> Iterator[Record]:
        """Train to the end, yielding after every step. Whoever iterates may stop, save, and go on later."""
        while self.step < self.config.steps:
            yield self.advance()

    def advance(self) -> Record:
        """Return do the next step, and the evaluation that is due after it."""
        started = time.perf_counter()
        config, parameters = self.config, list(self.model.parameters())
        lr = config.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.ranks.part(self.task.batch(config, self.step))
        loss = self._loss(batch.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = None if config.clip is None else torch.nn.utils.clip_grad_norm_(parameters, config.clip)
        self._synchronize()
        stepping = time.perf_counter()
        self.optimizer.step()
        self._synchronize()
        optimizer_ms = (time.perf_counter() - stepping) * 1e3
        self.step += 1
        validation, accuracy = self.evaluate() if config.evaluates_after(self.step) else (None, None)
        self.seconds += time.perf_counter() - started
        grad_norm = None if norm is None else float(gathered(norm))
        loss_mean = self.ranks.mean(loss)
        return Record(self.step, loss_mean, lr, grad_norm, optimizer_ms, self.seconds, validation, accuracy)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return the mean loss on the held-out part, nats per prediction, and the fraction predicted right."""
        scores = [self.model.score(batch.to(self.device)) for batch in self.task.held_out(self.config)]
        loss, right, count = (sum(column) for column in zip(*scores, strict=True))
        return loss / count, right / count

    def _synchronize(self) -> None:
        # The CPU is never asynchronous; an accelerator's time would otherwise land in whatever waits for it next.
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def run(config: TrainConfig, task: Task | None = None, on_record: Callable[[Record], None] | None = None) -> RunResult:
    """Train from the start to the end.

    Args:
        config: what to run.
        task: the data, to load it only once for several runs.
        on_record: called after every step.

    Raises:
        ValueError: see `Job`.
    """
    with thread_count(config.threads):
        job = Job(config, task)
        records = []
        for record in job.train():
            records.append(record)
            if on_record is not None:
                on_record(record)
        return finish(job, records)


def finish(job: Job, records: list[Record]) -> RunResult:
    """Measure the memory of a job that has reached its end, and put the result together."""
    trained = [p for p in job.model.parameters() if p.requires_grad]
    return RunResult(
        job.config,
        tuple(records),
        parameters=sum(p.numel() for p in trained),
        state_bytes=daypack.state_report(job.optimizer).total_bytes,
        weight_bytes=tensor_bytes(*job.model.parameters(), *job.model.buffers()),
        gradient_bytes=tensor_bytes(*(p.grad for p in trained if p.grad is not None)),
    )


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer that `config` names, over the decayed and undecayed parameters of `model`.

    Raises:
        ValueError: unknown name, or an option that the optimizer does not take.
    """
    groups = daypack.param_groups(model, weight_decay=config.weight_decay)
    try:
        return daypack.create(config.optimizer, groups, lr=config.lr, **config.options)
    except TypeError as error:
        raise ValueError(f"optimizer {config.optimizer!r} does not take {dict(config.options)}: {error}") from None


def require_device(name: str) -> torch.device:
    """Return the device called `name`.

    Raises:
        ValueError: no such device, or this machine or this build of torch has none.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot use device {name!r}: {reason}; try --device cpu") from None
    if device.type == "meta":
        raise ValueError("cannot train on device 'meta', which holds no numbers; try --device cpu")
    return device


@contextlib.contextmanager
def thread_count(threads: int | None) -> Iterator[None]:
    """Use that many CPU threads inside, and as many as before afterwards; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def json_number(value: Any) -> Any:
    """Return `value`, or None for a float that JSON cannot write (NaN, infinity)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
