"""The order of the rooms, what importing costs, and the size of files and functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "daypack"
FILES = sorted(SOURCE.rglob("*.py"))

# The rooms from the top down. A room imports only itself and rooms below it.
ROOMS = (
    *("cli", "lab", "telemetry", "planner", "inspection", "checkpoint", "presentation", "optim", "placement"),
    *("kernels", "projection", "sharding", "param", "formats", "calibration", "geometry", "rules"),
)
#: The package itself, whose `__init__` gathers the public names, imports no room above this one.
PUBLIC = "telemetry"

HEAVY = ("typer", "rich", "matplotlib", "jinja2", "triton", "torch.distributed.tensor", "click", "pandas")


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def imports(path: Path, text: str | None = None, everywhere: bool = True) -> Iterator[str]:
    """Modules of ours that a file imports; ``everywhere``: in functions and for type checking too."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    tree = ast.parse(text or path.read_text(encoding="utf-8"))
    if not everywhere:
        for node in ast.walk(tree):
            types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if types or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(filter(None, (*above, base)))
            deeper = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else base for name in deeper]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "daypack")


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def above(module: str, other: str) -> bool:
    """Whether ``other`` is in a room above that of ``module``; the package itself is above the rooms it gathers."""
    if not room(other):
        return ROOMS.index(room(module)) >= ROOMS.index(PUBLIC)
    return ROOMS.index(room(other)) < ROOMS.index(room(module))


def test_the_document_lists_the_rooms_in_their_order() -> None:
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("\n## Rooms\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)(/|\.py)` \|", table, re.MULTILINE)
    assert tuple(name for name, _ in listed) == ROOMS
    for name, end in listed:
        assert (SOURCE / name).is_dir() == (end == "/"), name


def test_documents_name_files_that_exist() -> None:
    """Paths in code marks, in the documents that say where things are."""
    root = SOURCE.parents[1]
    for document in ("docs/architecture.md", "CONTRIBUTING.md"):
        for path in re.findall(r"`([\w/]+\.(?:py|h|md))`", (root / document).read_text(encoding="utf-8")):
            assert any((base / path).exists() for base in (root, SOURCE, root / "docs")), f"{document}: {path}"


def test_the_rooms_are_those_that_exist() -> None:
    assert len({*ROOMS}) == len(ROOMS)
    assert {*ROOMS} == {room(module) for module in MODULES} - {"", "__main__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_downward(path: Path) -> None:
    me = module_of(path)
    if me == "daypack.__main__":
        return
    for name in imports(path):
        if me == "daypack":
            assert not room(name) or ROOMS.index(room(name)) >= ROOMS.index(PUBLIC), f"daypack imports {name}"
        else:
            assert not above(me, name), f"{me} imports {name}, which is above it"


def test_modules_do_not_import_in_circles() -> None:
    edges = {module_of(path): set(imports(path, everywhere=False)) - {module_of(path)} for path in FILES}
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        path.append(module)
        for other in sorted(edges.get(module, ())):
            visit(other)
        path.pop()
        done.add(module)

    for module in sorted(edges):
        visit(module)
    assert len(done) >= len(FILES)


@pytest.mark.parametrize(
    "text",
    [
        "from daypack.optim.base import x",
        "import daypack.optim.base",
        "def f():\n    from daypack.optim import base",
        "from daypack import optim",
        "from ..optim import base",
        "from .. import optim",
    ],
)
def test_the_check_sees_an_upward_import(text: str) -> None:
    found = list(imports(SOURCE / "formats" / "probe.py", text))
    assert found
    assert all(above("daypack.formats.probe", name) for name in found), found


def test_importing_is_light_and_touches_no_device() -> None:
    """Nothing but torch, numpy and ourselves; no distributed tensors, no command line, no device made ready."""
    code = f"""
import sys, torch
before = set(sys.modules)
import daypack
daypack.Gefen, daypack.create, daypack.param_groups
new = set(sys.modules) - before
heavy = [name for name in new if any(name == h or name.startswith(h + ".") for h in {HEAVY!r})]
assert not heavy, heavy
assert not torch.cuda.is_initialized()
import warnings, logging
assert not logging.getLogger("daypack").handlers
print("light", len(new))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("light")


def test_public_names_exist() -> None:
    import daypack

    assert sorted(daypack.__all__) == sorted(set(daypack.__all__))
    for name in daypack.__all__:
        assert hasattr(daypack, name), name
    for name in ("Gefen", "AdamW", "Adam", "SGD", "create", "names", "param_groups", "state_report"):
        assert name in daypack.__all__, name
    assert (SOURCE / "py.typed").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body
            start = body[1].lineno if len(body) > 1 and ast.get_docstring(node) else node.lineno
            assert node.end_lineno is not None
            assert node.end_lineno - start + 1 <= 60, f"{node.name} has {node.end_lineno - start + 1} lines"
