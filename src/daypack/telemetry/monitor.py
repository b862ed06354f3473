"""`monitor`: follow an optimizer while it trains, at little cost."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from daypack.telemetry.sample import Sample

#: Readings that a monitor keeps.
KEPT = 1000


class ScalarWriter(Protocol):
    """What is wanted of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


#: Called with tag, value and step.
Write: TypeAlias = "Callable[[str, float, int], Any]"


@dataclass(frozen=True)
class Reading:
    """What was measured at one step.

    Attributes:
        step: steps that the optimizer has taken, as its state counts them, so that a resumed run goes on counting.
        values: by tag; docs/monitor.md lists the tags and their units.
    """

    step: int
    values: dict[str, float]


class Monitor:
    """The handle that `monitor` returns. As a context manager it stops at the end of the block.

    Attributes:
        readings: the last ones, at most `KEPT`, oldest first.
    """

    def __init__(self, optimizer: Optimizer, write: Write | None, interval: int, prefix: str) -> None:
        self.readings: deque[Reading] = deque(maxlen=KEPT)
        self._write, self._interval, self._prefix = write, interval, prefix
        self._generator = torch.Generator()
        self._steps = 0
        self._times: list[float] = []
        self._started = self._since = 0.0
        self._sample: Sample | None = None
        self._skipped = _skipped(optimizer)
        # The optimizer keeps these hooks, and with them this monitor, which does not know the optimizer: no circle.
        self._hooks = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)

    def remove(self) -> None:
        """Stop measuring. Readings taken so far stay."""
        for hook in self._hooks:
            hook.remove()
        self._sample = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        due = (self._steps + 1) % self._interval == 0
        self._since = self._since or time.perf_counter()
        self._sample = None
        if due:
            self._generator.manual_seed(self._count(optimizer))  # the same sample in a run that was resumed
            self._sample = Sample(optimizer, self._generator)
        self._started = time.perf_counter()

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        now = time.perf_counter()
        self._times.append(now - self._started)
        self._steps += 1
        if self._sample is None:
            return
        skipped = _skipped(optimizer)
        values = {
            **self._sample.after(optimizer),
            "step_ms": 1e3 * statistics.median(self._times),
            "step_share": sum(self._times) / (now - self._since),
            "skipped": float(skipped - self._skipped),
        }
        self._sample, self._skipped = None, skipped
        reading = Reading(self._count(optimizer), {self._prefix + tag: x for tag, x in values.items()})
        self.readings.append(reading)
        for tag, value in reading.values.items():
            if self._write is not None:
                self._write(tag, value, reading.step)
        self._times.clear()
        self._since = time.perf_counter()

    def _count(self, optimizer: Optimizer) -> int:
        """Return the most steps that any parameter has taken if the state counts them, else the steps seen here."""
        params = (p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state)
        steps = (optimizer.state[p].get("step") for p in params)
        return max((int(step) for step in steps if isinstance(step, (int, float, Tensor))), default=0) or self._steps


def monitor(
    optimizer: Optimizer,
    writer: ScalarWriter | Write | None = None,
    interval: int = 100,
    *,
    prefix: str = "optimizer/",
) -> Monitor:
    """Measure what ``optimizer`` stores and does at every ``interval``-th step. docs/monitor.md.

    Bytes of state by format, RMS of the updates, what coding does to the moments, time of the step, and what was not
    finite. Of each parameter a sample is looked at, so that the cost does not grow with its size. Works with any
    optimizer of torch; what it does not have is left out. Numbers are those of this process: under DDP and FSDP2 no
    rank is asked for another's.

    Args:
        optimizer: of any kind that has torch's step hooks.
        writer: where values go: something with ``add_scalar(tag, value, step)``, such as
            ``torch.utils.tensorboard.SummaryWriter``, or a function of these three; None: they are kept in
            ``readings`` only.
        interval: steps from one reading to the next.
        prefix: of every tag, to tell optimizers apart.

    Returns:
        A handle with ``readings`` and ``remove()``. It need not be kept: the optimizer keeps it.

    Raises:
        ValueError: an argument is of another kind.
    """
    # Wrappers that call themselves optimizers may never have set up the hooks (accelerate).
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ValueError(
            f"monitor takes a torch.optim.Optimizer, got {type(optimizer).__name__}; if it wraps one, pass that one"
        )
    if type(interval) is not int or interval < 1:
        raise ValueError(f"interval of monitor must be a whole number of at least 1, got {interval!r}")
    write = getattr(writer, "add_scalar", writer)
    if write is not None and not callable(write):
        raise ValueError(
            f"writer of monitor must have add_scalar(tag, value, step), or be such a function, got {writer!r}"
        )
    return Monitor(optimizer, write, interval, str(prefix))


def _skipped(optimizer: Optimizer) -> int:
    """Return how often a parameter was passed over; only daypack's optimizers do that."""
    return sum(getattr(optimizer, "skipped", {}).values())
