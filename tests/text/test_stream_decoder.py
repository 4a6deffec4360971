"""Streamed text: whole characters, exactly the text of all ids, linear time."""

import time

import pytest

from dspark_jax.text import StreamDecoder, Tokenizer, load_tokenizer
from dspark_jax.text.token_bytes import BYTE_ALPHABET
from tests.text.samples import SAMPLES
from tests.text.test_tokenizer import sentencepiece_style


@pytest.fixture(scope="module")
def small(data_dir) -> Tokenizer:
    return load_tokenizer(data_dir / "tokenizer")


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [tokenizer.backend.token_to_id(BYTE_ALPHABET[b]) for b in data]


def stream(tokenizer: Tokenizer, ids: list[int], size: int, **settings) -> list[str]:
    decoder = StreamDecoder(tokenizer, **settings)
    pieces = [decoder.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*pieces, decoder.flush()]


def test_fr52_character_split_over_two_rounds(small):
    first = byte_ids(small, b"\xf0\x9f")
    second = byte_ids(small, b"\x98\x80")
    decoder = StreamDecoder(small)
    assert decoder.feed(first) == ""
    assert decoder.feed(second) == "😀"
    assert decoder.flush() == ""


def test_fr52_character_in_one_round(small):
    decoder = StreamDecoder(small)
    assert decoder.feed(byte_ids(small, "😀".encode())) == "😀"
    assert decoder.flush() == ""


def test_fr52_truncated_tail_is_flushed_once(small):
    ids = byte_ids(small, b"a\xf0\x9f")
    decoder = StreamDecoder(small)
    assert decoder.feed(ids) == "a"
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert small.decode(ids) == "a\ufffd"


def test_fr52_special_token_inside_a_character(small):
    ids = [*byte_ids(small, b"\xf0\x9f"), 1, *byte_ids(small, b"\x98\x80")]
    assert "".join(stream(small, ids, 1)) == small.decode(ids) == "😀"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_join_to_the_text(small, size):
    for text in SAMPLES.values():
        ids = small.encode(text)
        pieces = stream(small, ids, size, skip_special=False)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_join_to_the_text_for_any_ids(small, rng):
    for _ in range(300):
        ids = rng.integers(0, small.size, 30).tolist()
        size = int(rng.integers(1, 6))
        assert "".join(stream(small, ids, size)) == small.decode(ids)


def test_a_leading_space_is_dropped_only_at_the_start():
    tokenizer = sentencepiece_style()
    ids = tokenizer.encode("a a 😀")
    assert stream(tokenizer, ids, 1)[:2] == ["a", " a"]
    assert "".join(stream(tokenizer, ids, 1)) == tokenizer.decode(ids) == "a a 😀"
    # The mark and a byte character: the first piece with text carries the space.
    ids = tokenizer.encode("😀")
    assert "".join(stream(tokenizer, ids, 1)) == tokenizer.decode(ids) == "😀"
    ids = tokenizer.encode("a")
    assert "".join(stream(tokenizer, ids, 1, continued=True)) == " a"


def test_cost_is_linear(small):
    """Sixteen times the ids in far less than the 256 times of a quadratic way."""

    def seconds(count: int) -> float:
        ids = byte_ids(small, b"\xf0\x9f\x98\x80") * (count // 4)
        begin = time.perf_counter()
        stream(small, ids, 1)
        return time.perf_counter() - begin

    seconds(100)
    short = min(seconds(2_000) for _ in range(5))
    long = min(seconds(32_000) for _ in range(2))
    assert long < 80 * short
