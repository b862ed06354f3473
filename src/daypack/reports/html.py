"""Self-contained HTML pages: no script, no request, light and dark, desktop and phone."""

from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, title: str, **values: Any) -> str:
    """The page of ``template``, which extends ``base.html.j2``; every value is escaped, a missing one is an error."""
    return _environment().get_template(template).render(title=title, **values)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("daypack.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
