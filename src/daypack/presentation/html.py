"""Self-contained HTML pages: no script, no request, light and dark, desktop and phone."""

import base64
from collections.abc import Callable
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from daypack.presentation.figure import DARK, LIGHT, Theme, to_svg


def render(room: str, template: str, title: str, **values: Any) -> str:
    """Render ``template`` of a room's folder ``templates``; every value is escaped, a missing one is an error.

    Args:
        room: the package, such as ``daypack.inspection``.
        template: a file that extends ``base.html.j2``.
    """
    return _environment(room).get_template(template).render(title=title, **values)


def pictures(figure: Callable[[Theme, bool], Figure]) -> dict[str, str]:
    """Return data URIs of a figure for each theme and width, as ``picture.html.j2`` shows it.

    Args:
        figure: draws it, given the theme and whether it is wide.
    """
    return {
        f"{theme}_{'wide' if wide else 'narrow'}": "data:image/svg+xml;base64,"
        + base64.b64encode(to_svg(figure(colours, wide))).decode()
        for theme, colours in (("light", LIGHT), ("dark", DARK))
        for wide in (True, False)
    }


@cache
def _environment(room: str) -> Environment:
    return Environment(
        loader=ChoiceLoader([PackageLoader(room), PackageLoader(__package__ or "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
