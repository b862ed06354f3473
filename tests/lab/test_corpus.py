from __future__ import annotations

from pathlib import Path

import pytest
import torch

from daypack.lab import corpus as corpora
from daypack.lab.corpus import load_corpus, split_corpus


def numbered(lines: int) -> bytes:
    return b"".join(b"line %07d\n" % number for number in range(lines))


def test_no_byte_is_in_both_parts_and_none_is_lost() -> None:
    # Every 4 bytes spell their own position, so a byte that leaked would be recognised.
    content = torch.arange(100_000, dtype=torch.int32).numpy().tobytes()
    split = split_corpus(content, "")
    train = set(split.train.numpy().view("<i4").tolist())
    held_out = set(split.validation.numpy().view("<i4").tolist())
    assert not train & held_out
    assert train | held_out == set(range(100_000))
    assert 0.05 < len(held_out) / 100_000 < 0.07


def test_validation_is_spread_over_the_text() -> None:
    blocks = split_corpus(bytes(range(256)) * 4096, "").validation.view(-1, 8192)
    assert len(blocks) == 8


def test_batches_are_a_function_of_seed_and_step() -> None:
    text, before = split_corpus(numbered(2000), ""), torch.get_rng_state()
    batch = text.batch(1, 5, 4, 32)
    assert batch.shape == (4, 33)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, text.batch(1, 5, 4, 32))
    assert not torch.equal(batch, text.batch(1, 6, 4, 32))
    assert not torch.equal(batch, text.batch(2, 5, 4, 32))
    assert torch.equal(before, torch.get_rng_state())


def test_batches_reach_the_whole_training_part() -> None:
    text = split_corpus(bytes(range(256)), "")
    seen = torch.cat([text.batch(0, step, 8, 4).flatten() for step in range(200)]).unique()
    assert torch.equal(seen, text.train.long())


@pytest.mark.parametrize(("tokens", "expected"), [(64, 64), (1000, 992), (10**9, None)])
def test_validation_windows_are_fixed_and_predict_disjoint_bytes(tokens: int, expected: int | None) -> None:
    text = split_corpus(torch.arange(40_000, dtype=torch.int32).numpy().tobytes(), "")
    batches = list(text.validation_batches(tokens, 8, 32))
    assert all(torch.equal(one, two) for one, two in zip(batches, text.validation_batches(tokens, 8, 32), strict=True))
    windows = torch.cat(batches)
    assert windows.shape[1] == 33
    everything = (len(text.validation) - 1) // 32 * 32
    assert len(windows) * 32 == (everything if expected is None else expected)
    # The predicted part of each window starts a multiple of 32 after the first one: look each up in the text.
    held_out = bytes(text.validation.tolist())
    starts = [held_out.index(bytes(window.tolist())) for window in windows]
    assert all(start % 32 == 0 for start in starts)
    assert len(set(starts)) == len(starts)


def test_the_default_is_the_standard_library_without_tests_and_packages() -> None:
    text = load_corpus()
    assert len(text.train) + len(text.validation) > 5_000_000
    assert "standard library" in text.source
    assert text.fingerprint == load_corpus().fingerprint
    content = bytes(text.train[: 2 << 20].tolist())
    assert b"def " in content


def test_a_folder_is_its_text_files_in_sorted_order(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"second",
        "a.md": b"first ",
        "sub/c.py": b" third",
        "image.png": b"\x89PNG\0\0",
        ".hidden": b"secret",
        ".git/config": b"secret",
        "sub/copy.txt": b"second",
        "tests/t.py": b"left out",
        "empty.txt": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    text = load_corpus(tmp_path)
    assert len(text.train) + len(text.validation) == len(b"first second third")
    assert text.fingerprint == split_corpus(b"first second third", "").fingerprint
    assert text.source == str(tmp_path)


def test_a_single_file_may_hold_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(range(256)) * 10)
    text = load_corpus(str(tmp_path / "data.bin"))
    assert len(text.train) + len(text.validation) == 2560


def test_a_long_text_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "SIZE_LIMIT", 2**20)
    (tmp_path / "a.txt").write_bytes(b"a" * 2**19)
    (tmp_path / "b.txt").write_bytes(b"b" * 2**20)
    text = load_corpus(tmp_path)
    assert len(text.train) + len(text.validation) == 2**20
    assert text.source.startswith("the first 1 MiB of ")


def test_missing_empty_and_short_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file or folder: .*nowhere.txt; check the path"):
        load_corpus(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="empty corpus: no text in "):
        load_corpus(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty corpus: .*empty.txt"):
        load_corpus(tmp_path / "empty.txt")
    (tmp_path / "short.txt").write_bytes(b"a short text")
    with pytest.raises(
        ValueError, match=r"corpus too small: .* needs 129 of each; give more text or a shorter context"
    ):
        load_corpus(tmp_path / "short.txt").require(128)
