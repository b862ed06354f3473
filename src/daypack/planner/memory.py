"""`plan_memory`: will it fit, with which optimizer, and at what batch size?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from daypack.optim.base import CompressedOptimizer
from daypack.optim.galore import GaLore
from daypack.optim.registry import REGISTRY
from daypack.planner.activations import KNOTS, ActivationPlanner
from daypack.planner.advice import recommend
from daypack.planner.devices import gpu_memory
from daypack.planner.lora import ALL_LINEAR, with_lora
from daypack.planner.model import Inputs, ModelSpec, ParamSpec, from_module, from_shapes
from daypack.planner.parallel import Parallel
from daypack.planner.pretrained import describe
from daypack.planner.result import MemoryPlan, OptimizerPlan
from daypack.planner.state import parse_optimizer, plan_state
from daypack.planner.units import dtype_name

SEQUENCE = 2048
#: Larger sizes than these are taken for typing errors.
LARGEST = {"sequence": 10**8, "batch": 10**6, "gpus": 10**6}


@dataclass(frozen=True)
class _Setup:
    """What is the same for every optimizer. Bytes of one rank.

    Attributes:
        limit: memory of a GPU; None if there is none to fit into.
        state_params: what the optimizer sees: with master weights, fp32.
    """

    weights: int
    gradients: int
    copies: int
    communication: int
    limit: int | None
    batch: int
    state_params: tuple[ParamSpec, ...]
    parallel: Parallel
    activations: ActivationPlanner
    module: nn.Module | None
    foreach: bool

    @property
    def how(self) -> dict[str, Any]:
        """Further arguments of `plan_state`."""
        return {"module": self.module, "foreach": self.foreach}


def plan_memory(
    model: ModelSpec | nn.Module | Iterable[Any],
    *,
    optimizers: Sequence[str] | None = None,
    memory: int | None = None,
    gpu: str | None = None,
    gpus: int = 1,
    parallel: str | None = None,
    rank: int | None = None,
    weights: torch.dtype | None = None,
    gradients: torch.dtype | None = None,
    compute: torch.dtype | None = None,
    master_weights: bool = False,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] = (ALL_LINEAR,),
    gradient_checkpointing: bool = False,
    sequence: int | None = None,
    batch: int | None = None,
    attention: Literal["flash", "math"] = "flash",
    inputs: Inputs | None = None,
    foreach: bool = True,
) -> MemoryPlan:
    """Return what training takes on one GPU, for each optimizer. Nothing is allocated. Sizes are bytes; GB = 1e9 bytes.

    Weights, gradients and state are exact; activations are measured on the meta device where the model runs there, else
    estimated; temporaries of a step are an upper bound for daypack's optimizers and measured for torch's.

    Args:
        model: a module, on any device (it stays as it is), shapes or named shapes, or what
            `daypack.planner.sources.load_model` returns.
        optimizers: registered names, with options as in ``"sgd:momentum=0.9"``; all registered ones by default.
        memory: of one GPU, bytes. Or ``gpu``: its name.
        gpus: number of GPUs.
        parallel: none, ddp, zero1, zero2, zero3 or fsdp2 (`Parallel`); ddp by default where there are several GPUs.
        rank: whose memory; by default the rank that needs most.
        weights: dtype of the weights (not of adapters); by default what the model has.
        gradients: dtype of the gradients; by default the weights', as in torch.
        compute: dtype of the arithmetic; by default the weights'. Where it differs, autocast (or the sharder) keeps
            casts of the weights.
        master_weights: keep fp32 copies of 16-bit weights, and the state in fp32; neither torch nor daypack does so
            unless asked, DeepSpeed always does.
        lora_rank: freeze everything and train adapters of this rank on ``lora_targets``.
        gradient_checkpointing: compute the layers' activations anew in the backward pass.
        sequence: tokens per sample; by default 2,048, or the model's longest if that is shorter.
        batch: samples per GPU and pass; by default 1. The largest that fits is reported either way.
        attention: ``"math"`` counts the attention matrix, which flash kernels do not keep.
        inputs: (batch, sequence) -> arguments of the module's forward, on the meta device; models of transformers
            need none. Without them activations are not counted.
        foreach: torch's own optimizers step all parameters at once, their default on a GPU.

    Raises:
        ValueError: an argument cannot be used.
    """
    spec = _describe(model, inputs)
    _check(memory is not None and gpu is not None, optimizers, sequence=sequence, batch=batch, memory=memory, gpus=gpus)
    if lora_rank is not None:
        spec = with_lora(spec, lora_rank, lora_targets)
    spec = _with_weights(spec, weights)
    stored = _main_dtype(spec)
    layout = Parallel(parallel or ("ddp" if gpus > 1 else "none"), gpus, rank)
    length = sequence or min(SEQUENCE, spec.context or SEQUENCE)
    planner = ActivationPlanner(spec, length, compute or stored, attention == "flash", gradient_checkpointing)
    planner.exactly(batch or 1)
    if planner.problem and spec.called:
        raise ValueError(
            f"{spec.name} does not run on {spec.called}: {planner.problem}; correct it, or leave it out to plan "
            "without activations"
        )
    masters = master_weights or layout.flat
    setup = _Setup(
        weights=_weights(spec, layout),
        gradients=_gradients(spec, layout, gradients),
        copies=_copies(spec, layout, planner.compute, masters),
        communication=layout.gathered(spec, planner.compute.itemsize),
        limit=gpu_memory(gpu) if gpu is not None else memory,
        batch=batch or 1,
        state_params=tuple(_master(p) if masters else p for p in spec.trainable),
        parallel=layout,
        activations=planner,
        module=spec.module,
        foreach=foreach,
    )
    rows = tuple(_row(name, setup, strict=optimizers is not None) for name in optimizers or REGISTRY)
    plan = MemoryPlan(
        model=spec.name,
        parameters=spec.elements,
        trainable=spec.trainable_elements,
        weights_dtype=dtype_name(stored),
        gradients_dtype=dtype_name(gradients or (spec.trainable[0].dtype if spec.trainable else stored)),
        compute_dtype=dtype_name(planner.compute),
        parallel=layout.kind,
        gpus=gpus,
        rank=rank,
        memory=setup.limit,
        batch=setup.batch,
        sequence=length,
        activations=planner.exactly(setup.batch),
        rows=rows,
        notes=_notes(spec, planner, layout, master_weights),
    )
    return recommend(plan)


def _check(both: bool, optimizers: Sequence[str] | None, **sizes: int | None) -> None:
    for option, value in sizes.items():
        largest = LARGEST.get(option, 2**62)
        if value is not None and not 1 <= value <= largest:
            limit = "at least 1" if value < 1 else f"at most {largest}"
            raise ValueError(f"{option} must be {limit}, got {value}")
    if both:
        raise ValueError("give the memory of a GPU or its name, not both")
    if optimizers is not None and not list(optimizers):
        raise ValueError(f"name at least one optimizer: {', '.join(REGISTRY)}")


def _describe(model: ModelSpec | nn.Module | Iterable[Any], inputs: Inputs | None) -> ModelSpec:
    if isinstance(model, nn.Module):
        # A model of transformers says itself how it is called.
        model = (
            describe(model) if hasattr(model, "main_input_name") and hasattr(model, "config") else from_module(model)
        )
    if model is None or isinstance(model, (str, bytes, int)):
        raise ValueError(
            f"plan takes a module, shapes, or what daypack.planner.sources.load_model returns; got {model!r} (daypack "
            "plan on the command line knows names and sizes: there load_model and from_count read them)"
        )
    spec = model if isinstance(model, ModelSpec) else from_shapes(model)
    if not spec.params:
        raise ValueError(f"{spec.name} has no parameters")
    return spec if inputs is None else replace(spec, inputs=inputs, called="the given inputs")


def _with_weights(spec: ModelSpec, dtype: torch.dtype | None) -> ModelSpec:
    """Return ``spec`` with its floating-point parameters, except adapters, in ``dtype``."""
    if dtype is None:
        return spec
    params = (
        replace(p, dtype=dtype) if p.dtype.is_floating_point and "lora_" not in p.name else p for p in spec.params
    )
    return replace(spec, params=tuple(params))


def _main_dtype(spec: ModelSpec) -> torch.dtype:
    """Return the floating-point dtype of most elements; fp32 where all weights are quantised."""
    elements: Counter[torch.dtype] = Counter()
    for p in spec.params:
        if p.dtype.is_floating_point:
            elements[p.dtype] += p.elements
    return elements.most_common(1)[0][0] if elements else torch.float32


def _master(p: ParamSpec) -> ParamSpec:
    return replace(p, dtype=torch.float32) if p.dtype.itemsize < 4 else p


def _weights(spec: ModelSpec, layout: Parallel) -> int:
    share = layout.share if layout.shards_weights else (lambda p: p.elements)
    return spec.buffer_bytes + sum(share(p) * p.dtype.itemsize for p in spec.params)


def _gradients(spec: ModelSpec, layout: Parallel, dtype: torch.dtype | None) -> int:
    share = layout.share if layout.shards_gradients else (lambda p: p.elements)
    return sum(share(p) * (dtype or p.dtype).itemsize for p in spec.trainable)


def _copies(spec: ModelSpec, layout: Parallel, compute: torch.dtype, masters: bool) -> int:
    """Return the bytes of fp32 master weights, and of the casts that autocast keeps until the backward pass is over."""
    total = 0
    if masters:
        sharded = layout.shards_gradients
        total += sum(4 * (layout.share(p) if sharded else p.elements) for p in spec.trainable if p.dtype.itemsize < 4)
    if not layout.shards_weights:  # a sharder gathers in the dtype of the arithmetic: counted as gathered
        casts = (p for p in spec.params if len(p.shape) > 1 and p.dtype.is_floating_point and "lora_" not in p.name)
        total += sum(p.elements * compute.itemsize for p in casts if p.dtype.itemsize > compute.itemsize)
    return total


def _row(text: str, setup: _Setup, *, strict: bool) -> OptimizerPlan:
    """Return the plan of one optimizer. If it refuses the model: raise if it was asked for, else note the problem."""
    try:
        name, options = parse_optimizer(text)
        state = plan_state(name, setup.state_params, options, setup.parallel, **setup.how)
    except ValueError as error:
        if strict:
            raise
        return OptimizerPlan(text, problem=str(error))
    row = OptimizerPlan(
        optimizer=text,
        weights=setup.weights,
        gradients=setup.gradients,
        state=state.device_bytes,
        offloaded=state.offloaded,
        copies=setup.copies,
        communication=setup.communication,
        activations=setup.activations.exactly(setup.batch).peak,
        temporaries=state.temporaries,
        components=state.components,
        keeps_both_moments=state.keeps_both_moments,
        notes=tuple(f"{text}: {note}" for note in state.notes),
    )
    if issubclass(REGISTRY[name], GaLore) and options.get("rank") is None:
        row = replace(row, notes=(f"{text}: without a rank nothing is projected; plan it as {text}:rank=128",))
    if not issubclass(REGISTRY[name], CompressedOptimizer) and row.temporaries > row.activations:
        note = f"{text}: torch steps all parameters at once by default on a GPU; fused=True saves these temporaries"
        row = replace(row, notes=(*row.notes, note))
    if setup.limit is None:
        return row
    return replace(row, fits=row.total <= setup.limit, largest_batch=_largest_batch(row, setup, setup.limit))


def _largest_batch(row: OptimizerPlan, setup: _Setup, limit: int) -> int | None:
    """Return the largest micro-batch that fits; 0 if none does, None if activations are not known."""
    if setup.activations.exactly(1).how == "unknown":
        return None
    left = limit - row.resident
    if row.temporaries > left or setup.activations.peak(1) > left:
        return 0
    low, high = 1, KNOTS[-1]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if setup.activations.peak(middle) <= left else (low, middle - 1)
    return low


def _notes(spec: ModelSpec, planner: ActivationPlanner, layout: Parallel, masters: bool) -> tuple[str, ...]:
    notes = list(spec.notes)
    how = planner.exactly(1).how
    if how == "measured":
        notes.append("activations: measured on the model's forward and backward pass, run on shapes alone")
    elif how == "formula":
        why = f" because the model does not run on shapes alone ({planner.problem})" if planner.problem else ""
        notes.append(f"activations: a formula for decoder transformers{why}; within 10 %, with checkpointing 20 %")
    else:
        why = planner.problem or "nothing is known of the model but shapes"
        if not planner.problem and spec.module is not None:
            why = "it is not known how the model is called: give inputs, or --sample"
        notes.append(f"activations: not counted ({why})")
    if layout.flat:
        notes.append("ZeRO hands the optimizer flat fp32 vectors and keeps fp32 master weights of 16-bit ones")
    if not masters and not layout.flat and any(p.dtype.itemsize < 4 for p in spec.trainable):
        notes.append(
            "16-bit weights have no fp32 master copy here, and torch's own optimizers keep their state in 16 bits"
        )
    return tuple(notes)
