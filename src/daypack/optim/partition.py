"""Which elements of a parameter share a second moment in Adam-mini: rules as text, and the rule that a parameter gets.

A rule is a short string, so that it can stand in a parameter group and in a checkpoint:

    dense                   a second moment for each element
    tensor                  one for the whole tensor (for each matrix of a stack of experts)
    row, column             one for each row, each column: the neurons of `nn.Linear`, of GPT-2's transposed ``Conv1D``
    head:64                 one for each 64 rows (the same as row:64); column:64 for each 64 columns
    row:768x64,768x64,768x1 the first 768 rows in groups of 64, the next 768 as well, the last 768 one by one: a fused
                            query, key and value. Where the parameter has a multiple of these rows, it starts over
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeAlias

from torch import nn

from daypack.formats.line_mean import LineMean, Segments
from daypack.geometry import geometry
from daypack.optim.options import plain_name

#: Pattern for names, rule, and why; the first pattern that matches decides.
Entry: TypeAlias = tuple[str, ...]
Partition: TypeAlias = tuple[Entry, ...]

_RULE = re.compile(r"dense|tensor|(row|head|column)(?::([1-9]\d*|[1-9]\d*x[1-9]\d*(?:,[1-9]\d*x[1-9]\d*)*))?")

#: What the last part of a module's or a parameter's name says about an attention weight.
ROLES = {
    **dict.fromkeys(("q_proj", "query", "wq", "to_q", "q", "q_lin", "query_proj", "q_proj_weight"), "query"),
    **dict.fromkeys(("k_proj", "key", "wk", "to_k", "k", "k_lin", "key_proj", "k_proj_weight"), "key"),
    **dict.fromkeys(("v_proj", "value", "wv", "to_v", "v", "v_lin", "value_proj", "v_proj_weight"), "value"),
    **dict.fromkeys(("c_attn", "qkv_proj", "qkv", "wqkv", "in_proj_weight", "qkv_lin"), "fused"),
    "query_key_value": "interleaved",  # one head's query, key and value after another's: GPT-NeoX, BLOOM, Falcon
}
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "heads")
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_kv")


@dataclass(frozen=True)
class KnownHeads:
    """What is known about the heads of a model or of one of its layers; None: unknown.

    Attributes:
        num_heads: query heads.
        head_dim: elements of a head.
        value: ``"row"`` or ``"tensor"``: what shares a second moment in a value matrix.
    """

    num_heads: int | None
    head_dim: int | None
    value: str = "row"


@dataclass(frozen=True)
class Choice:
    """The rule of one parameter.

    Attributes:
        why: for the report.
        guessed: it looks like an attention weight, but the size of its heads is not known.
    """

    rule: str
    why: str
    guessed: bool = False


# ------------------------------------------------------------------ rules


def check_rule(rule: object, where: str) -> None:
    """Refuse what is not a rule.

    Raises:
        ValueError: names the value and the rules there are.
    """
    if not isinstance(rule, str) or not _RULE.fullmatch(rule):
        raise ValueError(
            f"the partition of {where} has the rule {rule!r}; write dense, tensor, row, column, head:64, column:64 or "
            "row:768x64,768x1 (lines x lines that share a second moment)"
        )


def check_partition(partition: object, where: str) -> None:
    """Refuse what is not a list of (pattern, rule) pairs."""
    if not isinstance(partition, (list, tuple)):
        raise ValueError(f"partition of {where} must be a list of (pattern, rule), got {partition!r}")
    for entry in partition:
        if (
            not isinstance(entry, (list, tuple))
            or len(entry) not in (2, 3)
            or not all(isinstance(x, str) for x in entry)
        ):
            raise ValueError(f"an entry of the partition of {where} must be (pattern, rule), got {entry!r}")
        check_rule(entry[1], where)


@lru_cache(maxsize=4096)
def form_of(rule: str, shape: tuple[int, ...], name: str) -> LineMean | None:
    """Return the format that ``rule`` means for a parameter of this shape; None: dense.

    Raises:
        ValueError: the rule's lines do not cover the parameter's.
    """
    match = _RULE.fullmatch(rule)
    if match is None or rule == "dense" or 0 in shape:
        return None
    view = geometry(shape)
    if rule == "tensor":
        return LineMean("row", ((view.rows, view.rows),))
    column = match[1] == "column"
    segments = _segments(match[2] or "1", view.cols if column else view.rows, rule, shape, name)
    return LineMean("col" if column else "row", segments)


def _segments(text: str, lines: int, rule: str, shape: tuple[int, ...], name: str) -> Segments:
    if "x" not in text:
        return ((lines, int(text)),)
    pairs = [tuple(map(int, part.split("x"))) for part in text.split(",")]
    total = sum(count for count, _ in pairs)
    if lines % total:
        raise ValueError(
            f"the rule {rule!r} covers {total} lines, parameter {name} of shape {shape} has {lines}; give a rule whose "
            "lines divide them, such as 'row'"
        )
    return tuple((count, size) for count, size in pairs) * (lines // total)


# ---------------------------------------------------------------- choices


@lru_cache(maxsize=65536)
def choose_rule(name: str, shape: tuple[int, ...], partition: Partition, known: KnownHeads) -> Choice:
    """Return the rule of a parameter: of the first entry of ``partition`` whose pattern matches, else by name and
    shape.
    """
    name = plain_name(name)
    for pattern, rule, *why in partition:
        if fnmatchcase(name, pattern):
            return Choice(rule, why[0] if why else f"partition option, {pattern!r}")
    return infer(name, shape, known)


def infer(name: str, shape: tuple[int, ...], known: KnownHeads, kind: str = "matrix") -> Choice:
    """Return the rule that a name, a shape and what is known about heads suggest; it always fits the shape.

    Args:
        kind: type of the module. GPT-2's linear layer in transformers, ``Conv1D``, keeps ``[inputs, outputs]``.
    """
    if len(shape) < 2 or 0 in shape:
        return Choice("dense", f"{len(shape)}-dimensional" if 0 not in shape else "empty")
    transposed = kind == "Conv1D" and len(shape) == 2
    axis = "column" if transposed else "row"
    role = _role(name) if len(shape) == 2 else ""
    if not role or (role == "value" and known.value == "row"):
        return Choice(axis, f"{role or kind}: one for each {axis}")
    lines, inputs = reversed(shape) if transposed else shape
    if role == "value":
        return Choice(f"{axis}:{lines}", "value: one for the whole matrix")
    size = _head_size(role, lines, inputs, known)
    if size and role in ("query", "key") and lines % size == 0:
        return Choice(f"{axis}:{size}" if transposed else f"head:{size}", f"{role}: one for each head of {size}")
    if size and role in ("fused", "interleaved"):
        fused = _fused(role, lines, size, known.num_heads or inputs // size, known.value)
        if fused:
            return Choice(f"{axis}:{fused}", f"{role} query, key and value, heads of {size}")
    return Choice(axis, f"{role}, but the size of its heads is not known: one for each {axis}", guessed=True)


def _role(name: str) -> str:
    parts = [part for part in name.lower().split(".") if part not in ("weight", "base_layer")]
    return ROLES.get(parts[-1], "") if parts else ""


def _head_size(role: str, lines: int, inputs: int, known: KnownHeads) -> int | None:
    if known.head_dim or not known.num_heads:
        return known.head_dim
    width = lines if role == "query" else inputs
    return width // known.num_heads if width % known.num_heads == 0 else None


def _fused(role: str, lines: int, size: int, heads: int, value: str) -> str:
    """Return the segments of a weight that holds query, key and value; "" if its lines do not add up to these."""
    shared, rest = divmod(lines - heads * size, 2 * size)  # key heads, as many value heads
    if rest or shared < 1 or heads < 1 or heads % shared:
        return ""
    queries, keys = (heads, shared) if role == "fused" else (heads // shared, 1)
    keys *= size
    return f"{queries * size}x{size},{keys}x{size},{keys}x{1 if value == 'row' else keys}"


# ------------------------------------------------------------------ models


def of_model(model: nn.Module, known: KnownHeads) -> Partition:
    """Return entries for every parameter of ``model``, from module types, configurations and names.

    A pattern stands for the same parameter of all layers: numbers in names become ``*``. A parameter for which that
    would give another rule than its own has an entry under its own name, before the patterns.
    """
    choices = dict(_choices(model, known))
    general: dict[str, Choice] = {}
    for name, choice in choices.items():
        general.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), choice)
    # Longer patterns first: a `*` also matches dots.
    patterns = sorted(general, key=lambda pattern: -len(pattern))
    entries = tuple((pattern, general[pattern].rule, general[pattern].why) for pattern in patterns)

    def matched(name: str) -> str:
        return next(rule for pattern, rule, _ in entries if fnmatchcase(name, pattern))

    exact = tuple((name, c.rule, c.why) for name, c in choices.items() if matched(name) != c.rule)
    return exact + entries


def _choices(model: nn.Module, known: KnownHeads) -> Iterator[tuple[str, Choice]]:
    """Yield the choice for each parameter once, under its first name."""
    modules, seen = dict(model.named_modules()), set()
    for prefix, module in modules.items():
        for key, p in module.named_parameters(recurse=False):
            if id(p) in seen:
                continue
            seen.add(id(p))
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            parts = prefix.split(".") if prefix else []
            path = [modules[".".join(parts[:depth])] for depth in range(len(parts), -1, -1)]
            yield name, infer(name, tuple(p.shape), _attention(path, known), type(module).__name__)


def _attention(path: Sequence[nn.Module], known: KnownHeads) -> KnownHeads:
    """Return what is known about a parameter's heads: what was given, else what its innermost module says."""
    sources = [source for module in path for source in (module, getattr(module, "config", None))]

    def find(names: Sequence[str]) -> int | None:
        found: Iterator[Any] = (getattr(source, name, None) for source in sources for name in names)
        return next((value for value in found if type(value) is int and value > 0), None)

    return KnownHeads(known.num_heads or find(_HEAD_COUNTS), known.head_dim or find(_HEAD_SIZES), known.value)
