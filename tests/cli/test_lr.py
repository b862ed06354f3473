from __future__ import annotations

import pytest

from daypack.cli.lr import parse_lr

NAMES = ["adamw", "gefen"]


def test_one_rate_or_one_each() -> None:
    assert parse_lr(None, NAMES, 0.5) == {"adamw": 0.5, "gefen": 0.5}
    assert parse_lr("2e-3", NAMES, 0.5) == {"adamw": 2e-3, "gefen": 2e-3}
    assert parse_lr("gefen=1e-3, adamw=2e-3", NAMES, 0.5) == {"adamw": 2e-3, "gefen": 1e-3}


@pytest.mark.parametrize("text", ["", "fast", "1e-3,2e-3", "adamw=", "adamw=x,gefen=1", "adamw=1,2", "adamw=1,adamw=2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read --lr .*; give one number as in 2e-3, or one each"):
        parse_lr(text, NAMES, 0.5)


@pytest.mark.parametrize("text", ["adamw=1", "adamw=1,sgd=2", "adamw=1,gefen=1,sgd=2"])
def test_every_optimizer_needs_one(text: str) -> None:
    with pytest.raises(ValueError, match="must name each of adamw, gefen once"):
        parse_lr(text, NAMES, 0.5)
