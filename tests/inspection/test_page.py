from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import daypack
from daypack.cli import run
from daypack.inspection import inspect_state
from daypack.inspection.figures import books, map_image
from daypack.inspection.page import SHOWN_MAPS, render_inspection
from tests.conformance.scene import parameters, train
from tests.lab.test_page import Page

SHAPES = {"embedding.weight": (40, 64), "a.<b>.weight": (24, 520), "conv.weight": (8, 8, 3, 3), "norm.weight": (64,)}


def inspected(name: str, shapes: Any = SHAPES, **options: Any) -> Any:
    params = parameters(shapes=shapes)
    optimizer = daypack.create(name, params.items(), **options)
    train(optimizer, params, range(2))
    return inspect_state(optimizer, pictures=True)


@pytest.mark.parametrize("name", [*daypack.names()])
def test_the_page_of_every_optimizer_is_whole_and_asks_the_network_for_nothing(name: str) -> None:
    options = {"rank": 4} if name == "galore" else {"min_8bit_size": 256} if name.endswith("8bit") else {}
    html = render_inspection(inspected(name, **options))
    page = Page(html)
    assert page.open == []
    for address in page.fetched:
        kind, _, content = address.partition(",")
        assert kind in ("data:image/svg+xml;base64", "data:image/png;base64")
        assert base64.b64decode(content).startswith((b"<?xml", b"\x89PNG"))
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    text = re.sub(r"base64,[\w+/=]*", "", html)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    text = " ".join(" ".join(page.text).split())
    assert ("Codebook" in text) == (
        name in ("gefen", "adamw8bit", "adam8bit", "sgd8bit", "lion8bit", "adopt", "ademamix", "muon")
    )
    assert ("scales of the first moment" in text) == ("Codebook" in text)
    assert ("Maps" in text) == (name != "sgd")
    assert "a.<b>.weight" in text
    # What ADOPT averages is clipped: many of its codes are on an end level.
    assert ("no rows, blocks or codes stand out" in text) == (name != "adopt")


def test_the_page_says_what_was_found() -> None:
    params = parameters(shapes=SHAPES)
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(2))
    optimizer.state[params["norm.weight"]]["exp_avg_sq"][3] = float("inf")
    found = inspect_state(optimizer, pictures=True)
    text = " ".join(" ".join(Page(render_inspection(found)).text).split())
    for words in (
        f"Gefen: {found.total.bytes_per_param:.3f} bytes of state per parameter",
        f"{found.total.bytes:,} bytes",
        "norm.weight : exp_avg_sq holds 1 value that is NaN or infinite".replace(" :", ":"),
        "8-bit learned/256 + factored",
        f"All {40 * 64 + 24 * 520 + 8 * 8 * 9:,} codes of 3 parameters",
        "root of the second moment",
    ):
        assert words in text, words


def test_equal_codebooks_are_one_figure() -> None:
    (book,) = books(inspected("gefen").params)
    assert book.params == 3
    assert int(book.codes.sum()) == 40 * 64 + 24 * 520 + 8 * 8 * 9
    assert len(books(inspected("adamw8bit", min_8bit_size=256).params)) == 2


def test_a_map_shows_its_numbers() -> None:
    """Brighter where a cell is larger, black where it is 0."""
    grid = torch.tensor([[0.0, 1e-6, 1e-3], [1.0, 1e-2, 0.0]], dtype=torch.float64)
    address, text = map_image(grid)
    pixels = imread(io.BytesIO(base64.b64decode(address.partition(",")[2])))[..., :3].sum(-1)
    assert pixels.shape == (2, 3)
    order = np.argsort(grid.numpy().ravel(), kind="stable")
    assert (np.diff(pixels.ravel()[order]) >= 0).all()
    assert pixels[0, 0] == pixels[1, 2] == 0
    assert pixels[0, 1] > 0
    assert text == "1e-06 to 1, 33.3% of the cells 0"
    assert map_image(torch.zeros(2, 2, dtype=torch.float64))[1] == "0 everywhere"
    assert map_image(torch.full((2, 2), 0.5, dtype=torch.float64))[1] == "0.5 to 0.5"


def test_many_parameters_have_the_maps_of_the_largest() -> None:
    shapes = {f"layer{i}.weight": (4, 8 + i) for i in range(SHOWN_MAPS + 3)}
    html = render_inspection(inspected("adamw", shapes))
    assert html.count('<figure class="map small">') == SHOWN_MAPS
    assert f"The {SHOWN_MAPS} largest of {SHOWN_MAPS + 3} parameters are shown." in html
    assert "layer0.weight</b>" not in html


def test_the_command_writes_the_page_and_replaces_an_old_one(tmp_path: Path) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    page = tmp_path / "page.html"
    page.write_text("old")
    assert run(["inspect", str(tmp_path / "state.pt"), "--html", str(page)]) == 0
    assert Page(page.read_text()).open == []
    first = page.read_text()
    assert run(["inspect", str(tmp_path / "state.pt"), "--html", str(page)]) == 0
    assert page.read_text() == first


def test_the_page_of_a_matrix_without_columns() -> None:
    found = inspected("adamw", {"none.weight": (8, 0), "norm.weight": (64,)})
    assert found.warnings == ()
    assert "none.weight" in render_inspection(found)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_codebook_that_is_damaged_is_warned_of_and_not_drawn(value: float) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = daypack.Gefen(params.items())
    train(optimizer, params, range(2))
    for state in optimizer.state.values():
        if "exp_avg_codebook" in state:
            state["exp_avg_codebook"] = state["exp_avg_codebook"].clone()
            state["exp_avg_codebook"][-1] = value
    found = inspect_state(optimizer, pictures=True)
    html = render_inspection(found)
    assert "Codebook of the first moment" not in html
    assert "exp_avg_codebook holds 1 value that is NaN or infinite" in html


def test_the_page_says_which_update_it_shows() -> None:
    text = " ".join(" ".join(Page(render_inspection(inspected("sgd", momentum=0.9))).text).split())
    assert "Update: RMS of the update that a gradient equal to the running mean would make" in text
