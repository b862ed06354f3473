"""The result of a plan: plain typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from daypack.planner.activations import Activations
from daypack.planner.units import show_bytes


@dataclass(frozen=True)
class OptimizerPlan:
    """What training with one optimizer takes on one GPU, in bytes.

    Attributes:
        optimizer: its registered name, with options.
        weights: parameters and buffers.
        gradients: of the trainable parameters.
        state: of the optimizer, codebooks and counters included; of paged state, what is on the GPU at a time.
        offloaded: bytes of paged state in host memory.
        copies: fp32 master weights, and casts of the weights that autocast keeps.
        communication: gathered parameters or gradient buckets.
        activations: peak of forward and backward beyond the rest.
        temporaries: peak of the optimizer's step beyond the rest.
        components: bytes of state by state key, wherever it is.
        keeps_both_moments: whether it has AdamW's first and second moment, in whatever form.
        fits: whether ``total`` is within the GPU's memory; None without one.
        largest_batch: largest micro-batch that fits, 0 if none; None without a GPU or where activations are not known.
        problem: why it cannot be planned, then all else is 0; empty for most.
    """

    optimizer: str
    weights: int = 0
    gradients: int = 0
    state: int = 0
    copies: int = 0
    communication: int = 0
    activations: int = 0
    temporaries: int = 0
    offloaded: int = 0
    components: Mapping[str, int] = field(default_factory=dict)
    keeps_both_moments: bool = False
    fits: bool | None = None
    largest_batch: int | None = None
    problem: str = ""
    notes: tuple[str, ...] = ()

    @property
    def resident(self) -> int:
        """What is there all the time."""
        return self.weights + self.gradients + self.state + self.copies + self.communication

    @property
    def total(self) -> int:
        """The peak: activations and the step's temporaries are never there together."""
        return self.resident + max(self.activations, self.temporaries)


@dataclass(frozen=True)
class MemoryPlan:
    """A plan for one model, optimizer by optimizer; ``str()`` of it is a table.

    Attributes:
        model: what was planned for.
        parameters, trainable: elements; tied weights once.
        rank: whose memory; None for the rank that needs most.
        memory: of one GPU, bytes.
        batch: samples per GPU and pass, which the rows are for.
        activations: of that batch.
        recommended: the optimizer to take; None if nothing fits.
        reason: why, in one sentence.
        notes: what was assumed, and what is unusual.
    """

    model: str
    parameters: int
    trainable: int
    weights_dtype: str
    gradients_dtype: str
    compute_dtype: str
    parallel: str
    gpus: int
    rank: int | None
    memory: int | None
    batch: int
    sequence: int
    activations: Activations
    rows: tuple[OptimizerPlan, ...]
    recommended: str | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()

    def __getitem__(self, optimizer: str) -> OptimizerPlan:
        """Return the row of one optimizer, by the text that it was asked for with."""
        for row in self.rows:
            if row.optimizer == optimizer:
                return row
        raise KeyError(optimizer)

    @property
    def planned(self) -> tuple[OptimizerPlan, ...]:
        """Rows without a problem."""
        return tuple(row for row in self.rows if not row.problem)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as ``daypack plan --json`` prints it. Sizes are bytes."""
        content = asdict(self)
        content["rows"] = [
            {**asdict(row), "components": dict(row.components), "resident": row.resident, "total": row.total}
            for row in self.rows
        ]
        return content

    @property
    def title(self) -> str:
        """Model, dtypes and layout in one line."""
        frozen = "" if self.trainable == self.parameters else f", {show_count(self.trainable)} of them trained"
        sizes = f"batch {self.batch}, sequence {self.sequence}"
        where = f", {self.gpus} GPUs ({self.parallel})" if self.gpus > 1 else ""
        limit = f", {show_bytes(self.memory)} each" if self.memory is not None else ""
        dtypes = f"weights {self.weights_dtype}, gradients {self.gradients_dtype}, arithmetic {self.compute_dtype}"
        return f"{self.model}: {show_count(self.parameters)} parameters{frozen}; {dtypes}; {sizes}{where}{limit}"

    def __str__(self) -> str:
        header, *lines = table_cells(self)
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        text = [
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (header, *lines)
        ]
        problems = [f"{row.optimizer}: {row.problem}" for row in self.rows if row.problem]
        _, name = unit(max((row.total for row in self.planned), default=0))
        return "\n".join(
            [f"{self.title}; sizes in {name}", *text, *problems, *filter(None, [self.reason]), *self.notes]
        )


def table_cells(plan: MemoryPlan) -> list[tuple[str, ...]]:
    """Return header and rows of the table, sizes in the `unit` of the largest total. Columns of zeros are left out."""
    rows = plan.planned
    columns = {
        "weights": [row.weights for row in rows],
        "gradients": [row.gradients for row in rows],
        "state": [row.state for row in rows],
        "on host": [row.offloaded for row in rows],
        "copies": [row.copies for row in rows],
        "gathered" if plan.parallel in ("fsdp2", "zero3") else "buckets": [row.communication for row in rows],
        "activations": [row.activations for row in rows],
        "step": [row.temporaries for row in rows],
        "total": [row.total for row in rows],
    }
    always = ("weights", "gradients", "state", "total")
    shown = {title: sizes for title, sizes in columns.items() if title in always or any(sizes)}
    cells = [["optimizer", *(row.optimizer for row in rows)]]
    scale, _ = unit(max((row.total for row in rows), default=0))
    cells += [[title, *(_figure(size / scale) for size in sizes)] for title, sizes in shown.items()]
    if plan.memory is not None:
        cells.append(["fits", *("yes" if row.fits else "no" for row in rows)])
        if plan.activations.how != "unknown":
            cells.append(["largest batch", *(str(row.largest_batch or "none") for row in rows)])
    return [tuple(row) for row in zip(*cells, strict=True)]


def unit(largest: int) -> tuple[float, str]:
    """Return the unit of a table whose largest size is ``largest`` bytes: its number of bytes, and its name."""
    return (1e9, "GB") if largest >= 5e8 else (1e6, "MB")


def _figure(value: float) -> str:
    if value == 0:
        return "0"
    if value < 0.001:
        return "<0.001"
    return f"{value:.{3 if value < 1 else 2 if value < 99.995 else 1}f}"


def show_count(elements: int) -> str:
    """Format a number of parameters: ``6.74 B``, ``124 M``."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if elements >= scale:
            return f"{elements / scale:.{'0f' if elements >= 999.5 * scale else '3g'}} {unit}"
    return str(elements)
