"""Commands on files of optimizer state: consolidate, split, convert, transplant."""

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import daypack
from daypack.checkpoint import changed_model, conversion, foreign, save_file
from daypack.checkpoint.report import Report
from daypack.checkpoint.shards import consolidate as join_shards
from daypack.checkpoint.shards import split as split_file
from daypack.checkpoint.snapshot import ParamState, Snapshot
from daypack.lab import build_model, model_config, presets
from daypack.optim.registry import REGISTRY

From = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Optimizer that saved it: a name, or adamw, adam, sgd, lion for other libraries' 8-bit forms.",
        show_default="found from the state",
    ),
]
OptionTexts = Annotated[
    list[str] | None, typer.Option("--option", help="Option of the new optimizer, as second_moment=blocks; repeatable.")
]
Table = Annotated[bool, typer.Option("--table", help="Show every parameter, not a summary.")]


def consolidate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="SHARDS... OUT", help="All shards of one checkpoint, or their index; then the file to write."
        ),
    ],
) -> None:
    """Put the shards that ranks saved together into one file, the one that a single process would have saved.

    Takes the memory of one tensor, and no process group. The index is the file that has the name given at saving.

    Example: daypack consolidate shards/state.safetensors whole.safetensors
    """
    *shards, out = files
    if not shards:
        raise ValueError(
            "give the shards or their index, then the file to write: daypack consolidate state-*-of-* whole.safetensors"
        )
    _require_new(out)
    join_shards(shards, out)
    print(f"{out}: {out.stat().st_size:,} bytes from {len(shards)} shards")


def split(
    file: Annotated[Path, typer.Argument(help="A file of optimizer state.")],
    count: Annotated[int, typer.Argument(metavar="N", help="Number of shards.")],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder for the shards.")],
) -> None:
    """Divide a file into the shards that N ranks would have saved, and an index of them under the file's name.

    `daypack consolidate` is the inverse, bit for bit. N is at most the rows of the parameter with the most.

    Example: daypack split state.safetensors 4 shards
    """
    index = out / file.name
    if index.exists():
        raise ValueError(f"{index} exists; give another folder, or delete it first")
    for path in (*split_file(file, count, out), index):
        print(f"{path}: {path.stat().st_size:,} bytes")


def convert(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A file of daypack.checkpoint.save_file, of torch.save(optimizer.state_dict()), or of daypack train."
        ),
    ],
    out: Annotated[
        Path, typer.Argument(help="The file to write (safetensors); load it with daypack.checkpoint.load_file.")
    ],
    to: Annotated[str, typer.Option(help=f"The new optimizer: {', '.join(daypack.names())}.")],
    source: From = None,
    option: OptionTexts = None,
    table: Table = False,
) -> None:
    """Turn the state of one optimizer into that of another, so that training goes on with it.

    Says for each moment whether it was kept exactly, rounded (and by how much) or dropped (and why).

    Example: daypack convert runs/adamw/checkpoint.pt gefen.safetensors --to gefen
    """
    options, to = _options(option), _known(to)
    _require_new(out)
    new, report = conversion.convert_snapshot(foreign.read(checkpoint, source), to, **options)
    save_file(new, out)
    _show(report, table, out)


def transplant(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="OLD_CKPT", help="State of the old model's optimizer; any file that `daypack convert` reads."
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            metavar="NEW_MODEL",
            help=f"module:function that returns the new model, or a preset ({', '.join(presets())}) with changes as in "
            "tiny,layers=3,mlp_hidden=264.",
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The file to write (safetensors).")],
    rename: Annotated[
        list[str] | None,
        typer.Option(help="Old and new names, as 'layers.*=blocks.*'; repeatable, the first match counts."),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            help="A dim that is divided into heads, how many before and now, as '*.q_proj.weight=0:4:8'; repeatable."
        ),
    ] = None,
    to: Annotated[str | None, typer.Option(help="Another optimizer.", show_default="that of the checkpoint")] = None,
    source: From = None,
    option: OptionTexts = None,
    table: Table = False,
) -> None:
    """Carry optimizer state into a changed model: wider, deeper, more heads, a larger vocabulary, other names.

    Parameters are matched by name; of changed shapes the leading corner is kept. Says what was kept, grown, cut,
    new or dropped. A module:function is imported and called: it is your own code.

    Example: daypack transplant runs/adamw/checkpoint.pt tiny,mlp_hidden=264 wider.safetensors
    """
    changed = {pattern: _heads(value) for pattern, value in _pairs(heads, "--heads")}
    renames, options = dict(_pairs(rename, "--rename")), _options(option)
    to = to and _known(to)
    module = _model(model)
    _require_new(out)
    old = foreign.read(checkpoint, source)
    new = _over(old, module, to or _name(old.optimizer), renames, options)
    report = changed_model.transplant(old, new, renames, changed)
    save_file(new, out)
    _show(report, table, out)


#: Each command, and what its usage shows for options: a required one by name.
STATE_COMMANDS: dict[Callable[..., None], str] = {
    consolidate: "[OPTIONS]",
    split: "[OPTIONS]",
    convert: "--to NAME [OPTIONS]",
    transplant: "[OPTIONS]",
}


def _require_new(out: Path) -> None:
    if out.exists():
        raise ValueError(f"{out} exists; give a new name, or delete it first")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder; make it first")


def _show(report: Report, table: bool, out: Path) -> None:
    print(report.table() if table else report)
    print(f"{out}: {out.stat().st_size:,} bytes")


def _pairs(texts: Sequence[str] | None, option: str) -> list[tuple[str, str]]:
    for text in texts or ():
        if "=" not in text:
            form = {"--option": "name=value", "NEW_MODEL": "name=value", "--heads": "pattern=heads"}.get(
                option, "old=new"
            )
            raise ValueError(f"cannot read {option} {text!r}; give it as {form}")
    return [(text.partition("=")[0], text.partition("=")[2]) for text in texts or ()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _options(texts: Sequence[str] | None) -> dict[str, Any]:
    return {key: _value(text) for key, text in _pairs(texts, "--option")}


def _heads(text: str) -> tuple[int, int, int]:
    try:
        dim, before, now = map(int, text.split(":"))
    except ValueError:
        raise ValueError(f"cannot read --heads ...={text!r}; give dim:before:now, as 0:4:8") from None
    return dim, before, now


def _known(name: str) -> str:
    if name not in REGISTRY:
        raise ValueError(f"unknown optimizer {name!r} for --to; choose one of {', '.join(REGISTRY)}")
    return name


def _name(cls_name: str) -> str:
    for name, cls in REGISTRY.items():
        if cls.__name__ == cls_name:
            return name
    raise ValueError(f"no optimizer here is called {cls_name}; give one with --to")


def _model(text: str) -> nn.Module:
    """Return the model that ``text`` names."""
    if ":" not in text:
        name, *changes = text.split(",")
        fields = {key: _value(value) for key, value in _pairs(changes, "NEW_MODEL")}
        try:
            return build_model(model_config(name, **fields), 0)
        except TypeError as error:
            raise ValueError(f"cannot build the model {text!r}: {error}") from None
    module, _, function = text.partition(":")
    sys.path.insert(0, "")  # the user's own folder, as with python -c
    try:
        model = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot get the model {text!r}: {error}") from None
    finally:
        sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise ValueError(f"{text} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _over(old: Snapshot, model: nn.Module, name: str, rename: dict[str, str], options: dict[str, Any]) -> Any:
    """Build an optimizer for the shapes of ``model``; a group takes the options that most of its members had."""
    before = {
        changed_model.renamed(member, rename): index
        for index, (_, members) in enumerate(old.groups)
        for member in members
    }
    groups: list[tuple[dict[str, Any], tuple[str, ...]]] = []
    params: dict[str, ParamState] = {}
    for group in daypack.param_groups(model):
        members = tuple(member for member, _ in group["params"])
        params |= {member: ParamState(tuple(p.shape), p.dtype, {}) for member, p in group["params"]}
        chosen = Counter(before[member] for member in members if member in before).most_common(1)
        own = {key: value for key, value in group.items() if key != "params"}
        carried = conversion.kept_options(old.groups[chosen[0][0]][0], old, name, options) if chosen else {}
        groups.append(({**own, **carried}, members))
    return conversion.hollow(name, groups, params, True, options)
