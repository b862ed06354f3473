"""`daypack plan`."""

import json
from pathlib import Path
from typing import Annotated

import typer

import daypack
from daypack.checkpoint.atomic import write_whole
from daypack.cli.progress import make_console
from daypack.planner.devices import GPUS
from daypack.planner.figures import save_bars
from daypack.planner.lora import ALL_LINEAR
from daypack.planner.memory import SEQUENCE, plan_memory
from daypack.planner.parallel import KINDS
from daypack.planner.result import MemoryPlan
from daypack.planner.sources import from_count, load_model
from daypack.planner.table import memory_table
from daypack.planner.units import DTYPES, parse_bytes, parse_dtype

_DTYPES = ", ".join(DTYPES)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A config.json, a model type known to transformers, a .safetensors file, a folder of either, or "
            "module:function that returns a torch module (or a module and a function of batch and sequence that "
            "returns its arguments).",
            show_default=False,
        ),
    ] = None,
    params: Annotated[str | None, typer.Option(help="Instead of a model, its size: 7B, 350M, 1.3e9.")] = None,
    gpu: Annotated[str | None, typer.Option(help=f"Name of the GPU: {', '.join(GPUS)}.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a GPU instead: 24GB (24e9 bytes) or 24GiB.")] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    parallel: Annotated[
        str | None, typer.Option(help=f"{', '.join(KINDS)}.", show_default="ddp if there are several GPUs")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help=f"Dtype of the weights: {_DTYPES}.", show_default="the model's, else fp32")
    ] = None,
    gradients: Annotated[
        str | None, typer.Option(help="Dtype of the gradients; bf16 halves them.", show_default="the weights'")
    ] = None,
    compute: Annotated[str | None, typer.Option(help="Dtype of the arithmetic.", show_default="the weights'")] = None,
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="Keep fp32 copies of 16-bit weights.")
    ] = False,
    lora_rank: Annotated[int | None, typer.Option(help="Train adapters of this rank and nothing else.")] = None,
    lora_targets: Annotated[
        str, typer.Option(help="Comma-separated names of the layers with adapters, * for any part.")
    ] = ALL_LINEAR,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Compute activations anew in the backward pass: less memory, about a third more time.",
        ),
    ] = False,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens per sample.", show_default=f"{SEQUENCE}, or the model's longest")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples per GPU and pass. The largest that fits is shown anyway.", show_default="1"),
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="What a module from a function is fed: 3x224x224, or ids for token ids.")
    ] = None,
    attention: Annotated[
        str, typer.Option(help="flash, or math for kernels that keep the attention matrix.")
    ] = "flash",
    optimizers: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, with options as in sgd:momentum=0.9 or galore:rank=128:inner=gefen. Known: "
            f"{', '.join(daypack.names())}.",
            show_default="all",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write the bars to this PNG file.")] = None,
) -> int:
    """Say what training will take, before anything is allocated: will it fit, with which optimizer, at what batch?

    Weights, gradients and optimizer state are exact. Activations are measured on the model's own forward and backward
    pass, run on shapes alone, where that is possible. GB = 1e9 bytes. Nothing is downloaded.

    \b
    Examples, from the least to the most that is known of the model:
      daypack plan --params 7B --gpu rtx4090 --weights bf16
      daypack plan llama --gpu h100 --gpus 8 --parallel fsdp2
      daypack plan config.json --gpu a10 --lora-rank 16 --gradient-checkpointing
      daypack plan my_package.models:build --sample 3x224x224 --memory 24GB --plot bars.png
    """
    if (model is None) == (params is None):
        raise ValueError(
            "give a model or --params, and not both; as in daypack plan llama, or daypack plan --params 7B"
        )
    if attention not in ("flash", "math"):
        raise ValueError(f"--attention must be flash or math, got {attention!r}")
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot writes PNG files, got {plot}")
    result = plan_memory(
        from_count(params) if params is not None else load_model(model or "", sample=sample),
        optimizers=[part.strip() for part in optimizers.split(",") if part.strip()] if optimizers is not None else None,
        memory=parse_bytes(memory) if memory is not None else None,
        gpu=gpu,
        gpus=gpus,
        parallel=parallel,
        weights=parse_dtype(weights) if weights is not None else None,
        gradients=parse_dtype(gradients) if gradients is not None else None,
        compute=parse_dtype(compute) if compute is not None else None,
        master_weights=master_weights,
        lora_rank=lora_rank,
        lora_targets=[part.strip() for part in lora_targets.split(",") if part.strip()],
        gradient_checkpointing=gradient_checkpointing,
        sequence=sequence,
        batch=batch,
        attention="flash" if attention == "flash" else "math",
    )
    if plot is not None:
        write_whole(plot, lambda path: save_bars(result, path))
    _show(result, as_json=as_json, plot=plot)
    return 0


def _show(result: MemoryPlan, *, as_json: bool, plot: Path | None) -> None:
    console = make_console()
    if as_json:
        console.out(json.dumps(result.to_dict(), indent=2), highlight=False)
        return
    console.print(result.title, soft_wrap=True)
    console.print()
    console.print(memory_table(result))
    console.print()
    for row in result.rows:
        if row.problem:
            console.print(f"{row.optimizer}: not planned: {row.problem}", soft_wrap=True)
    console.print(result.reason, soft_wrap=True)
    for note in (*result.notes, *(note for row in result.rows for note in row.notes)):
        console.print(f"- {note}", soft_wrap=True)
    if plot is not None:
        console.print(f"bars: {plot}", soft_wrap=True)
