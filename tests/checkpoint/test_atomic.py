from __future__ import annotations

from pathlib import Path

import pytest

from daypack.checkpoint.atomic import write_text_whole, write_whole


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_whole(path, "one")
    write_text_whole(path, "two ±")
    assert path.read_text(encoding="utf-8") == "two ±"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    write_text_whole(path, "one")

    def fail(temporary: Path) -> None:
        temporary.write_text("tw")
        raise error

    with pytest.raises(type(error)):
        write_whole(path, fail)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]
