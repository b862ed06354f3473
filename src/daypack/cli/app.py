"""Options of the commands; what they do is in `daypack.cli.compare` and `daypack.cli.train`."""

from pathlib import Path
from typing import Annotated

import typer

import daypack
from daypack.cli import compare as compare_command
from daypack.cli import inspect as inspect_commands
from daypack.cli import plan as plan_command
from daypack.cli import state as state_commands
from daypack.cli import train as train_command
from daypack.lab import TASKS, TrainConfig
from daypack.lab.config import dtypes

app = typer.Typer(
    help="Train with compressed optimizer state, and see what it costs and saves.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

DEFAULT = TrainConfig()

# An option that is not given stays None and takes TrainConfig's default, so that --resume can tell the two apart.
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="What is trained: text (a transformer, the next byte), images (a convolutional network, handwritten "
        "digits) or graph (graph convolutions, the factions of a club). The last two need daypack[tasks].",
        show_default=DEFAULT.task,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Size of the model. "
        + "; ".join(f"{name}: {', '.join(kind.models)}" for name, kind in TASKS.items())
        + ".",
        show_default=DEFAULT.model,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text file or folder to train on (text only).", show_default="the Python standard library's sources"
    ),
]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps.", show_default=str(DEFAULT.steps))]
Batch = Annotated[
    int | None,
    typer.Option(help="Windows or images per step; a graph is trained whole.", show_default=str(DEFAULT.batch)),
]
Context = Annotated[int | None, typer.Option(help="Bytes per window (text only).", show_default=str(DEFAULT.context))]
WeightDecay = Annotated[
    float | None, typer.Option(help="Weight decay of matrices.", show_default=str(DEFAULT.weight_decay))
]
EvalEvery = Annotated[
    int | None, typer.Option(help="Steps between evaluations on held-out data.", show_default="a tenth of the steps")
]
Device = Annotated[str | None, typer.Option(help="Torch device, such as cpu or cuda.", show_default=DEFAULT.device)]
Dtype = Annotated[
    str | None, typer.Option(help=f"Of weights and arithmetic: {', '.join(dtypes())}.", show_default=DEFAULT.dtype)
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads.", show_default="1 for small models, else torch's choice")
]
Parallel = Annotated[
    str | None,
    typer.Option(
        help="How the processes that torchrun started share the run: none, ddp or fsdp2 (text only).",
        show_default=DEFAULT.parallel,
    ),
]
Out = Annotated[Path, typer.Option(help="Folder that results go below.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"daypack {daypack.__version__}")
        raise typer.Exit


app.command()(plan_command.plan)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train with compressed optimizer state, and see what it costs and saves."""


@app.command()
def compare(
    optimizers: Annotated[
        str,
        typer.Option(help=f"Comma-separated names; the first is the baseline. Known: {', '.join(daypack.names())}."),
    ] = "adamw,gefen",
    seeds: Annotated[int, typer.Option(help="Runs per optimizer; more than one gives standard errors.")] = 1,
    lr: Annotated[
        str | None,
        typer.Option(
            help="Peak learning rate: one, or one each as in adamw=2e-3,sgd=0.1.", show_default=f"{DEFAULT.lr:g}"
        ),
    ] = None,
    task: TaskName = None,
    steps: Steps = None,
    model: Model = None,
    data: Data = None,
    batch: Batch = None,
    context: Context = None,
    weight_decay: WeightDecay = None,
    eval_every: EvalEvery = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    parallel: Parallel = None,
    out: Out = Path("runs"),
    name: Annotated[str, typer.Option(help="Folder of this comparison below --out.")] = "compare",
) -> int:
    """Train one model with several optimizers, from the same start on the same batches, and compare them.

    Shows loss and accuracy on held-out data, measured bytes of optimizer state per parameter, time per optimizer step
    and wall time. Writes report.html, loss.png, metrics.jsonl and config.json to OUT/NAME once all runs are done; an
    earlier comparison of that name is replaced then, anything else there is refused. Progress goes to stderr, the
    result to stdout.

    Example: daypack compare --optimizers adamw,gefen --seeds 3 --model tiny, or with --task images
    """
    given = {
        "task": task,
        "steps": steps,
        "model": model,
        "data": data,
        "batch": batch,
        "context": context,
        "weight_decay": weight_decay,
        "eval_every": eval_every,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "parallel": parallel,
    }
    return compare_command.run(given, optimizers=optimizers, seeds=seeds, lr=lr, out=out, name=name)


@app.command()
def train(
    optimizer: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(daypack.names())}.", show_default=DEFAULT.optimizer),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", show_default=f"{DEFAULT.lr:g}")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the initial weights and the batches.", show_default=str(DEFAULT.seed))
    ] = None,
    task: TaskName = None,
    steps: Steps = None,
    model: Model = None,
    data: Data = None,
    batch: Batch = None,
    context: Context = None,
    weight_decay: WeightDecay = None,
    eval_every: EvalEvery = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    parallel: Parallel = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder that results go below.", show_default=str(train_command.OUT))
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Folder of this run below --out.", show_default="the optimizer")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    monitor: Annotated[
        int | None,
        typer.Option(
            help="Steps between readings of the optimizer (state, updates, codes, time), which go to monitor.jsonl.",
            show_default="none",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on from a run's folder or its checkpoint.pt, bit for bit. The checkpoint has all settings; "
            "only --data (if the same text has moved), --device, --threads and --eval-every may differ; --parallel, "
            "--checkpoint-every and --monitor are to be given again, --out and --name left out."
        ),
    ] = None,
) -> int:
    """Train one model with one optimizer, with checkpoints.

    Writes checkpoint.pt, metrics.jsonl, and at the end report.html and loss.png, to OUT/NAME, which must be new. Ctrl-C
    (or SIGTERM) finishes the step, saves, and exits with code 130 (143); --resume goes on from there. A run that
    diverges exits with code 1. Progress goes to stderr, the result to stdout.

    Example: daypack train --optimizer gefen --steps 2000, later: daypack train --resume runs/gefen
    """
    given = {
        "optimizer": optimizer,
        "lr": lr,
        "seed": seed,
        "task": task,
        "steps": steps,
        "model": model,
        "data": data,
        "batch": batch,
        "context": context,
        "weight_decay": weight_decay,
        "eval_every": eval_every,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "parallel": parallel,
    }
    every = train_command.Every(checkpoint_every, monitor)
    return train_command.run(given, out=out, name=name, resumed=resume, every=every)


for command, usage in {**inspect_commands.COMMANDS, **state_commands.COMMANDS}.items():
    app.command(options_metavar=usage)(command)
