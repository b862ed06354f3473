from __future__ import annotations

import base64
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from daypack.lab import RunResult, summarise_runs
from daypack.lab.curve import draw, save_curve
from daypack.lab.page import render_page
from daypack.lab.table import comparison_table
from daypack.presentation.figure import DARK, LIGHT, to_svg
from tests.lab.samples import PROVENANCE, comparison, result

VOID = {"meta", "img", "source", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks nesting, and collects text and everything that could be fetched."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in {"src", "srcset", "href", "data", "action"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_and_asks_the_network_for_nothing() -> None:
    html = render_page(comparison(), PROVENANCE)
    page = Page(html)
    assert page.open == []
    assert page.fetched
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.fetched)
    for address in page.fetched:
        assert base64.b64decode(address.partition(",")[2]).rstrip().endswith(b"</svg>")
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_the_page_says_what_was_found_and_how_to_repeat_it() -> None:
    text = " ".join(" ".join(Page(render_page(comparison(0.001), PROVENANCE)).text).split())
    for words in (
        "gefen ends level with adamw, with 7.6x less optimizer state",
        "2.1000 ± 0.0577",
        "+0.0010 ± 0.0012",
        "1.050",
        "7.3 GB",
        "56.0 GB",
        "daypack compare --data 'a & b' --name x",
        "<script>alert(1)</script>",
        "0123456789abcdef",
        "2.13.0",
        "0, 1, 2",
    ):
        assert words in text, words


@pytest.mark.parametrize(
    "results",
    [
        [result("adamw", 0, [2.0, 1.5])],
        [result("adamw", 0, [2.0]), result("sgd", 0, [math.nan], 0)],
        [result("sgd", 0, [2.0], 0), result("adamw", 0, [1.5])],
        [result("adamw", 0, [math.nan]), result("gefen", 0, [1.5])],
        [result(f"o{i}", 0, [2.0, 1.0]) for i in range(8)],
    ],
)
def test_unusual_results_have_a_page_and_a_table(results: list[RunResult], tmp_path: Path) -> None:
    assert Page(render_page(results, PROVENANCE)).open == []
    save_curve(results, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    Console(file=io.StringIO()).print(comparison_table(summarise_runs(results)))


def test_the_same_results_give_the_same_bytes() -> None:
    assert render_page(comparison(), PROVENANCE) == render_page(comparison(), PROVENANCE)
    light, dark = (to_svg(draw(comparison(), theme, wide=True)) for theme in (LIGHT, DARK))
    assert light != dark


def test_the_table_has_a_row_for_each_optimizer() -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(comparison_table(summarise_runs(comparison(0.1))))
    rows = [line.split() for line in output.getvalue().splitlines()]
    assert ["adamw", "0.003", "2.1000", "±", "0.0577", "8.000", "2.00", "2.0"] in rows
    gefen = next(row for row in rows if row[:1] == ["gefen"])
    assert gefen[2:9] == ["2.2000", "±", "0.0589", "+0.1000", "±", "0.0012", "1.050"]
    assert "\x1b" not in output.getvalue()
