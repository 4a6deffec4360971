"""Tokenizers from GGUF metadata, small ones and the default model's.

Whether ids equal those of the published tokenizer file cannot be seen from a GGUF
file alone; the default model is therefore tested by round trips only, and the
small one, of which both forms are at hand, id by id.
"""

import json

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from dspark_jax.text import (
    Tokenizer,
    load_tokenizer,
    next_turn,
    render_chat,
    tokenizer_from_gguf,
)
from dspark_jax.text.gguf_tokenizer import _pre_tokenizer
from tests.text.samples import SAMPLES


@pytest.fixture(scope="module")
def metadata(data_dir) -> dict:
    """The small tokenizer as a GGUF file would hold it."""
    folder = data_dir / "tokenizer"
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = np.where(np.arange(len(tokens)) < 3, 3, 1).astype(np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in state["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(2),
        "tokenizer.ggml.eot_token_id": np.uint32(0),
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def test_ids_equal_those_of_the_tokenizer_file(metadata, data_dir):
    published = load_tokenizer(data_dir / "tokenizer")
    rebuilt = tokenizer_from_gguf(metadata)
    for text in SAMPLES.values():
        assert rebuilt.encode(text) == published.encode(text)
    assert sorted(rebuilt.eos_ids) == sorted(published.eos_ids)
    assert render_chat(rebuilt, "Hi") == render_chat(published, "Hi")


def test_metadata_as_json_in_a_converted_checkpoint(metadata, tmp_path):
    plain = {
        key: np.asarray(value).tolist() if "ggml" in key else value
        for key, value in metadata.items()
    }
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_gguf.json").write_text(json.dumps(plain))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("Paris, Rome") == tokenizer_from_gguf(metadata).encode(
        "Paris, Rome"
    )


def test_bos_is_added_where_the_file_says_so(metadata):
    plain = tokenizer_from_gguf(metadata).encode("Rome")
    added = tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert added.encode("Rome") == [1, *plain]
    assert added.encode("Rome", special=False) == plain
    family = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"})
    assert family.encode("Rome")[0] == 1


def test_llama_takes_whole_words_without_merges(metadata):
    words = {"tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "zqz"]}
    types = {"tokenizer.ggml.token_type": [3] * 3 + [1] * 286}
    merged = tokenizer_from_gguf(metadata | words | types)
    assert len(merged.encode("zqz")) == 3
    pre = {"tokenizer.ggml.pre": "llama-bpe"}
    whole = tokenizer_from_gguf(metadata | words | types | pre)
    assert whole.encode("zqz", special=False) == [288]


def test_user_defined_tokens_are_whole_but_not_special(metadata):
    types = metadata["tokenizer.ggml.token_type"].copy()
    types[0] = 4
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.token_type": types})
    ids = tokenizer.encode("<|endoftext|><|im_end|>")
    assert ids == [0, 2]
    assert tokenizer.decode(ids) == "<|endoftext|>"


def pieces(pre: str, text: str) -> list[str]:
    """How the text is cut, with spaces and line ends written as bytes are."""
    return [piece for piece, _ in _pre_tokenizer(pre).pre_tokenize_str(text)]


TEXT = "I'm I'LL 12345 ok!!\n\n  x"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "I|'m|ĠI|'|LL|Ġ12345|Ġok|!!|ĊĊĠ|Ġx"),
        ("smollm", "I|'m|ĠI|'|LL|Ġ|1|2|3|4|5|Ġok|!!|ĊĊĠ|Ġx"),
        ("llama-bpe", "I|'m|ĠI|'LL|Ġ|123|45|Ġok|!!ĊĊ|Ġ|Ġx"),
        ("qwen2", "I|'m|ĠI|'LL|Ġ|1|2|3|4|5|Ġok|!!ĊĊ|Ġ|Ġx"),
        ("default", "I|'|m|ĠI|'|LL|Ġ|123|45|Ġok|!!|ĊĊĠ|Ġx"),
    ],
)
def test_splits(pre, expected):
    assert pieces(pre, TEXT) == expected.split("|")


@pytest.mark.parametrize("text", SAMPLES.values(), ids=SAMPLES.keys())
def test_splits_equal_the_librarys_where_it_has_them(text):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    for pre, library in (
        ("gpt-2", byte_level),
        ("smollm", pre_tokenizers.Sequence([digits, byte_level])),
    ):
        expected = [piece for piece, _ in library.pre_tokenize_str(text)]
        assert pieces(pre, text) == expected


def test_qwen2_text_is_normalised(metadata):
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.decode(tokenizer.encode("cafe\u0301")) == "café"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "llama", "model 'llama'.*tokenizer.json"),
        ("tokenizer.ggml.pre", "bloom", "`tokenizer.ggml.pre` is 'bloom'.*smollm"),
        ("tokenizer.ggml.merges", ["ab"], "merges` has 'ab'"),
        ("tokenizer.ggml.token_type", [1], "1 entries.*288"),
    ],
)
def test_other_tokenizers_are_refused_by_name(metadata, key, value, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(metadata | {key: value})


def test_missing_metadata_is_named(metadata):
    for key in ("model", "tokens", "merges"):
        rest = {k: v for k, v in metadata.items() if not k.endswith(f".{key}")}
        with pytest.raises(ValueError, match=f"no `tokenizer.ggml.{key}`"):
            tokenizer_from_gguf(rest)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf) -> Tokenizer:
    fields = gguf.GGUFReader(smollm2_gguf).fields
    return tokenizer_from_gguf(
        {key: field.contents() for key, field in fields.items() if "tokenizer" in key}
    )


def test_smollm2_round_trips(smollm2):
    assert smollm2.size == 49152
    for text in SAMPLES.values():
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special=False) == text
        assert smollm2.backend.decode(ids, skip_special_tokens=False) == text


def test_smollm2_adds_no_bos_and_ends_at_im_end(smollm2):
    assert smollm2.eos_ids == (2,)
    assert smollm2.encode("") == []
    assert smollm2.encode("<|im_start|>user\n")[0] == 1
    assert smollm2.decode([17]) != ""
    assert [smollm2.decode([i]) for i in range(17)] == [""] * 17


def test_smollm2_bytes_without_a_token(smollm2):
    missing = [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2]
    for byte in missing:
        char = chr(byte) if byte < 0x80 else ("\U00040000", "\U00080000")[byte - 0xF1]
        with pytest.raises(ValueError, match=f"byte 0x{byte:02x}"):
            smollm2.encode(f"a{char}b")
    present = "".join(chr(b) for b in range(128) if b not in missing)
    assert smollm2.decode(smollm2.encode(present)) == present


def test_smollm2_chat(smollm2):
    text = render_chat(smollm2, "Hi")
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # The default system prompt: 21 tokens, the same in front of every chat.
    system = text[: text.index("<|im_start|>user")]
    assert len(smollm2.encode(system, special=False)) == 21
    assert next_turn(smollm2, "And?", last_token=2) == (
        "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
