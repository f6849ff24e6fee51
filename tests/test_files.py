"""A file is written whole or not at all."""

import os
from pathlib import Path
from typing import Any

import pytest

from torchtune_adaptive.files import write_whole


def test_writing_again_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.json"
    assert [write_whole(path, text) for text in ("first", "second")] == [path, path]
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["while writing", "before replacing"])
def test_a_write_that_fails_leaves_the_former_file_whole(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_whole(tmp_path / "state.json", "former")
    write_text = Path.write_text

    def half(path: Path, text: str, *args: Any, **options: Any) -> int:
        write_text(path, text[: len(text) // 2], *args, **options)
        raise OSError("no space left on device")

    def refuse(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        if fault == "while writing":
            patch.setattr(Path, "write_text", half)
        else:
            patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="no space left"):
            write_whole(path, "latter")
    assert path.read_text() == "former"
