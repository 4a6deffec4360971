"""Files appear whole or not at all."""

import os

import pytest

from dspark_jax.files import replace_text, staged


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "notes.json"
    replace_text(path, "old\n")
    with pytest.raises(RuntimeError, match="half"), staged(path) as partial:
        partial.write_text("ne")
        raise RuntimeError("half")
    assert path.read_text() == "old\n"
    replaced = os.replace

    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_text(path, "new\n")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.json"]
    assert path.read_text() == "old\n"
    monkeypatch.setattr(os, "replace", replaced)
    replace_text(path, "new\n")
    assert path.read_text() == "new\n"


def test_the_staged_file_has_the_ending_of_the_real_one(tmp_path):
    with staged(tmp_path / "picture.svg") as partial:
        assert partial.suffix == ".svg" and partial.parent == tmp_path
        partial.write_text("x")
    assert (tmp_path / "picture.svg").read_text() == "x"
