"""The format of training text: what is written is read, what is wrong is named."""

import dataclasses

import numpy as np
import pytest

from dspark_jax.training.sequences import (
    Sequences,
    join,
    loss_mask,
    read_sequences,
    shard_path,
    write_sequences,
)


def _text(count: int = 3, largest: int = 49151, prompt: bool = True) -> Sequences:
    rng = np.random.default_rng(count)
    tokens = rng.integers(0, largest + 1, size=(count, 6)).astype(np.int32)
    tokens[0, 0] = largest
    role = np.array([[0, 0, 1, 0, 2, 2]] * count, np.uint8)
    role[-1, 4:] = [2, 255]
    tokens[role == 255] = 0
    heat = rng.choice([0.0, 0.7, 1.0], count).astype(np.float32)
    index = np.arange(count, dtype=np.int32) - 1
    return Sequences(tokens, role, heat, index if prompt else None)


def _same(a: Sequences, b: Sequences) -> None:
    for field in dataclasses.fields(Sequences):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype


@pytest.mark.parametrize("largest", [65535, 65536, 150_000])
def test_a_file_reads_as_it_was_written(tmp_path, largest):
    text = _text(largest=largest)
    write_sequences(tmp_path / "a.npz", text)
    _same(read_sequences(tmp_path / "a.npz"), text)
    # The published layout: short ids where they fit, nothing else left behind.
    stored = np.load(tmp_path / "a.npz")["tokens"].dtype
    assert stored == (np.uint16 if largest < 65536 else np.int32)
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_masks_and_lengths():
    text = _text(2)
    assert loss_mask(text).tolist() == [
        [False, False, False, False, True, True],
        [False, False, False, False, True, False],
    ]
    assert text.written.tolist()[0] == [False, False, True, False, True, True]
    assert text.lengths.tolist() == [6, 5] and len(text) == 2


def test_shards_are_joined_in_order(tmp_path):
    parts = [_text(n) for n in (4, 2, 3)]
    for number in (2, 0, 1):
        write_sequences(shard_path(tmp_path, number), parts[number])
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / ".part-00003.npz.partial-1").write_text("half")
    _same(read_sequences(tmp_path), join(parts))
    shard_path(tmp_path, 1).unlink()
    with pytest.raises(ValueError, match="part-00001.npz is missing"):
        read_sequences(tmp_path)


def test_prompts_are_known_only_if_all_are():
    assert join([_text(2), _text(2, prompt=False)]).prompt is None
    both = join([_text(2), _text(2)]).prompt
    assert both is not None and both.tolist() == [-1, 0, -1, 0]


def _arrays(**changes) -> dict:
    text = _text()
    arrays = {
        "tokens": text.tokens.astype(np.uint16),
        "role": text.role,
        "temperature": text.temperature,
    }
    return {k: v for k, v in (arrays | changes).items() if v is not None}


BACKWARDS = np.array([[0, 2, 255, 2, 2, 2]] * 3, np.uint8)
WRONG = {
    "no role": {"role": None},
    "`tokens` is float32; it must be integers": {"tokens": np.ones((3, 6), "f4")},
    "`tokens` holds -1": {"tokens": np.full((3, 6), -1)},
    "`tokens` is [18]": {"tokens": np.ones(18, np.int32)},
    "`role` is int32[3, 6]; it must be uint8": {"role": np.zeros((3, 6), np.int32)},
    "`role` is uint8[3, 5]; it must be uint8[3, 6]": {"role": np.zeros((3, 5), "u1")},
    "`role` holds 3; allowed": {"role": np.full((3, 6), 3, np.uint8)},
    "`temperature` is float32[2]": {"temperature": np.zeros(2, np.float32)},
    "`temperature` is int32": {"temperature": np.zeros(3, np.int32)},
    "`temperature` holds nan": {"temperature": np.array([0, np.nan, 1], "f4")},
    "`temperature` holds -0.5": {"temperature": np.array([0, 1, -0.5], "f4")},
    "sequence 0 has tokens behind padding": {"role": BACKWARDS},
    "`prompt` is int32[1]": {"prompt": np.zeros(1, np.int32)},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_file_is_named(tmp_path, message):
    path = shard_path(tmp_path, 0)
    np.savez(path, **_arrays())
    read_sequences(tmp_path)
    np.savez(path, **_arrays(**WRONG[message]))
    for place in (path, tmp_path):
        with pytest.raises(ValueError) as error:
            read_sequences(place)
        assert message in str(error.value) and str(path) in str(error.value)


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "a.npz"
    for content in (b"", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.npz cannot be read"):
            read_sequences(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"a\.npz cannot be read"):
        read_sequences(path)
    with pytest.raises(ValueError, match=r"gone\.npz cannot be read"):
        read_sequences(tmp_path / "gone.npz")
    path.unlink()
    with pytest.raises(ValueError, match="holds no shards"):
        read_sequences(tmp_path)


def test_shards_of_two_lengths(tmp_path):
    text = _text()
    short = Sequences(text.tokens[:, :5], text.role[:, :5], text.temperature)
    write_sequences(shard_path(tmp_path, 0), text)
    write_sequences(shard_path(tmp_path, 1), short)
    with pytest.raises(ValueError, match=r"part-00001\.npz: sequences have 5"):
        read_sequences(tmp_path)


def test_nothing_wrong_is_written(tmp_path):
    text = dataclasses.replace(_text(), role=BACKWARDS)
    with pytest.raises(ValueError, match="behind padding"):
        write_sequences(tmp_path / "a.npz", text)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    write_sequences(path, _text(2))

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        write_sequences(path, _text(3))
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]
    _same(read_sequences(path), _text(2))
