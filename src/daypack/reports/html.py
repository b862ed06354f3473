"""Self-contained HTML pages: no script, no request, light and dark, desktop and phone."""

import base64
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from daypack.reports.curve import DARK, LIGHT, Theme, to_svg


def render(template: str, title: str, **values: Any) -> str:
    """The page of ``template``, which extends ``base.html.j2``; every value is escaped, a missing one is an error."""
    return _environment().get_template(template).render(title=title, **values)


def pictures(figure: Callable[[Theme, bool], Figure]) -> dict[str, str]:
    """Data URIs of a figure for each theme and width, as ``picture.html.j2`` shows it.

    Args:
        figure: draws it, given the theme and whether it is wide.
    """
    return {
        f"{theme}_{'wide' if wide else 'narrow'}": "data:image/svg+xml;base64,"
        + base64.b64encode(to_svg(figure(colours, wide))).decode()
        for theme, colours in (("light", LIGHT), ("dark", DARK))
        for wide in (True, False)
    }


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("daypack.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
