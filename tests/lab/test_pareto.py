from __future__ import annotations

import itertools
import math
import re

import pytest
from matplotlib.text import Annotation

from daypack.lab import summarise_runs
from daypack.lab.page import render_page
from daypack.lab.pareto import draw_pareto, frontier
from daypack.presentation.figure import DARK, LIGHT, to_svg
from tests.lab.samples import PROVENANCE, comparison, result


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    runs = [
        result("adamw", 0, [1.5], 8000),
        result("gefen", 0, [1.6], 1050),
        result("adamw8bit", 0, [1.6], 2030),
        result("lion8bit", 0, [1.9], 1020),
        result("sgd", 0, [2.0], 0),
        result("lamb", 0, [math.nan], 10),
        result("adam", 0, [1.7], 8000),
    ]
    assert frontier(summarise_runs(runs)) == [(0, 2.0), (1.02, 1.9), (1.05, 1.6), (8.0, 1.5)]


@pytest.mark.parametrize("wide", [True, False])
def test_names_stand_inside_and_apart(wide: bool) -> None:
    names = ["adamw", "gefen", "adamw8bit", "lion8bit", "sgd8bit", "adam_mini", "adam"]
    sizes = [8000, 1050, 2030, 1020, 1030, 4000, 8000]
    runs = [
        result(name, seed, [1.5 + 0.002 * index + 0.05 * seed], size)
        for index, (name, size) in enumerate(zip(names, sizes, strict=True))
        for seed in range(2)
    ]
    figure = draw_pareto(summarise_runs(runs), LIGHT, wide=wide)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    assert [label.get_text() for label in labels] == names
    frame, boxes = axes.get_window_extent(), [label.get_window_extent() for label in labels]
    for label, box in zip(labels, boxes, strict=True):
        assert frame.x0 <= box.x0, label
        assert box.x1 <= frame.x1, label
    pairs = itertools.combinations(range(len(names)), 2)
    hidden = [(names[i], names[j]) for i, j in pairs if boxes[i].overlaps(boxes[j])]
    assert not hidden


def test_the_same_results_give_the_same_figure_in_each_theme() -> None:
    summaries = summarise_runs(comparison())
    first, again = (to_svg(draw_pareto(summaries, LIGHT, wide=True)) for _ in range(2))
    assert first == again
    assert first != to_svg(draw_pareto(summaries, DARK, wide=True))


def test_the_page_shows_memory_in_parts_and_the_time_of_a_step() -> None:
    html = render_page(comparison(), PROVENANCE)
    assert "Loss against state" in html
    # 4 kB of weights, 4 of gradients, 8 of state: the longest bar is whole, and the other one in proportion.
    widths = [[float(x) for x in re.findall(r"width: ([\d.]+)%", bar)] for bar in re.findall(r'class="stack">.*', html)]
    assert widths == [[25.0, 25.0, 50.0], [25.0, 25.0, pytest.approx(100 * 1050 / 16000, abs=0.01)]]
    rows = re.findall(r"<td>gefen</td>(.*?)</tr>", html, re.DOTALL)
    assert re.findall(r">([^<>]+)</td>", rows[0]) == ["2.00", "1.00 ± 0.00", "2.0", "0.2"]


def test_one_run_or_one_that_is_left_has_no_plot() -> None:
    assert "Loss against state" not in render_page([result("adamw", 0, [2.0])], PROVENANCE)
    diverged = [result("adamw", 0, [2.0]), result("sgd", 0, [math.nan], 0)]
    assert "Loss against state" not in render_page(diverged, PROVENANCE)
    three = render_page([*diverged, result("gefen", 0, [2.0], 1050)], PROVENANCE)
    assert "Not shown: sgd, which diverged" in three
