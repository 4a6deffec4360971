"""Round trips, dropped characters, and loading from folders."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from dspark_jax.errors import CheckpointError
from dspark_jax.text import Tokenizer, load_tokenizer
from dspark_jax.text.token_bytes import BYTE_ALPHABET
from tests.text.samples import SAMPLES


@pytest.fixture(scope="module")
def small(data_dir) -> Tokenizer:
    return load_tokenizer(data_dir / "tokenizer")


def sentencepiece_style() -> Tokenizer:
    """Characters a, b, a space mark, byte tokens; one leading space is invisible."""
    pieces = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
    model = BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    return Tokenizer(backend)


def test_alphabet_is_the_published_one():
    assert sorted(BYTE_ALPHABET) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert BYTE_ALPHABET[ord(" ")] == "Ġ"
    assert BYTE_ALPHABET[ord("\n")] == "Ċ"


@pytest.mark.parametrize("text", SAMPLES.values(), ids=SAMPLES.keys())
def test_round_trip(small, text):
    ids = small.encode(text)
    assert small.decode(ids, skip_special=False) == text
    assert small.decode(ids) == small.backend.decode(ids)


def test_decode_is_the_librarys_for_any_ids(small, rng):
    # Random ids are mostly broken UTF-8: both must replace the same parts.
    for length in (1, 2, 5, 40):
        for _ in range(200):
            ids = rng.integers(0, small.size, length).tolist()
            for skip in (True, False):
                expected = small.backend.decode(ids, skip_special_tokens=skip)
                assert small.decode(ids, skip_special=skip) == expected


def test_sentencepiece_style_decoding_is_the_librarys():
    tokenizer = sentencepiece_style()
    for text in ("a b", " a", "  ab", "aéb😀 a", "", "a  b "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text


def test_ids_may_be_numpy_and_beyond_the_vocabulary(small):
    ids = np.asarray(small.encode("Paris") + [small.size + 7], np.int32)
    assert small.decode(ids) == "Paris"


def test_special_tokens_are_skipped_by_id(small):
    ids = [1, *small.encode("Rome"), 2]
    assert small.decode(ids) == "Rome"
    assert small.decode(ids, skip_special=False) == "<|im_start|>Rome<|im_end|>"


def without_bytes(data_dir, missing: bytes, normalizer=None) -> Tokenizer:
    """The small tokenizer without a token for some bytes."""
    state = json.loads((data_dir / "tokenizer" / "tokenizer.json").read_text())
    gone = {BYTE_ALPHABET[b] for b in missing}
    vocab = state["model"]["vocab"]
    state["model"]["vocab"] = {t: i for t, i in vocab.items() if t not in gone}
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend)


def test_a_byte_without_a_token_is_named_not_dropped(data_dir):
    tokenizer = without_bytes(data_dir, b"\x04\xf1")
    # The library itself drops it, which is what the check is for.
    assert tokenizer.backend.decode(tokenizer.backend.encode("a\x04b").ids) == "ab"
    with pytest.raises(ValueError, match=r"U\+0004.* position 1 .*0x04"):
        tokenizer.encode("a\x04b")
    with pytest.raises(ValueError, match=r"U\+40000.* position 2 .*0xf1"):
        tokenizer.encode("é \U00040000")
    assert tokenizer.decode(tokenizer.encode("aéb")) == "aéb"


def test_the_byte_check_sees_normalised_text(data_dir):
    # NFC makes one character of e and U+0301, whose first byte is 0xcc.
    nfc = without_bytes(data_dir, b"\xcc", normalizers.NFC())
    assert nfc.decode(nfc.encode("cafe\u0301")) == "café"
    with pytest.raises(ValueError, match="0xcc"):
        without_bytes(data_dir, b"\xcc").encode("cafe\u0301")


def test_the_first_token_counts_as_a_byte(data_dir):
    model = BPE({c: i for i, c in enumerate(BYTE_ALPHABET)}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(backend).encode("\x00\x01") == [0, 1]


def test_lone_surrogates_are_refused(small):
    with pytest.raises(ValueError, match="surrogate.* character 1"):
        small.encode("a\ud83d")


def test_loading_reads_ends_and_template(small):
    assert small.eos_ids == (2, 0)
    assert small.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    assert small.bos_id == 1
    assert small.chat_template is not None


def copy_of(data_dir, tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(data_dir / "tokenizer", folder)
    return folder


def test_loading_without_the_optional_files(data_dir, tmp_path):
    folder = copy_of(data_dir, tmp_path)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_ids == (2,)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ((), None)
    assert tokenizer.bos_id is None
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    assert load_tokenizer(tmp_path).eos_ids == (2,)


def test_template_of_the_config_and_named_templates(data_dir, tmp_path):
    folder = copy_of(data_dir, tmp_path)
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    config.write_text('{"chat_template": "one"}')
    assert load_tokenizer(folder).chat_template == "one"
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(folder).chat_template == "plain"


def test_prompts_are_never_cut_or_filled_up(data_dir, tmp_path):
    folder = copy_of(data_dir, tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("x" * 9)) == 9
    assert len(tokenizer.encode("x")) == 1


def test_nothing_to_load(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer in .*tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot read"):
        load_tokenizer(tmp_path)


def test_unknown_decoder_is_refused_at_load(data_dir, tmp_path):
    folder = copy_of(data_dir, tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for decoder in (
        decoders.WordPiece(),
        decoders.Replace(Regex("x+"), "y"),
        decoders.Strip(content=" ", left=2, right=0),
    ):
        backend.decoder = decoder
        backend.save(str(folder / "tokenizer.json"))
        with pytest.raises(ValueError, match="decoder step .* not supported"):
            load_tokenizer(folder)
