"""Matchers made by llguidance, token by token."""

import dataclasses
import importlib
import json

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.matching import Matcher
from dspark_jax.grammar import Grammars
from dspark_jax.testing import byte_tokenizer
from dspark_jax.testing.tiny import EOS_ID, VOCAB

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    """One token a byte; nothing is computed with it."""
    rows = np.zeros((VOCAB, VOCAB), np.float32)
    return dspark.testing.scripted_model(
        rows, rows, eos_ids=(EOS_ID,), tokenizer=byte_tokenizer()
    )


@pytest.fixture(scope="module")
def grammars(model):
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    return Grammars(model)


def choices(matcher):
    """What may come next: text, and whether the end may."""
    words = matcher.allowed()
    assert words.dtype == np.uint32 and words.shape == (-(-VOCAB // 32),)
    ids = [i for i in range(VOCAB) if words[i // 32] >> np.uint32(i % 32) & 1]
    return bytes(i for i in ids if i < 256).decode("latin-1"), EOS_ID in ids


def feed(matcher, text):
    return all(matcher.advance(byte) for byte in text.encode())


def test_a_schema_token_by_token(grammars):
    matcher = grammars.json_schema(SCHEMA)
    assert isinstance(matcher, Matcher)
    assert choices(matcher) == ("{", False)
    assert feed(matcher, '{"name": "Bo", "age": 4')
    assert choices(matcher) == ("0123456789}", False)
    matcher.rollback(len('", "age": 4'))
    assert feed(matcher, 'b", "age": 17}')
    # Complete: nothing but the end, and then nothing is asked any more.
    assert choices(matcher) == ("", True) and not matcher.finished
    assert matcher.advance(EOS_ID) and matcher.finished


def test_the_end_can_be_taken_back(grammars):
    matcher = grammars.regex("a+")
    assert feed(matcher, "aa") and choices(matcher) == ("a", True)
    assert matcher.advance(EOS_ID) and matcher.finished
    matcher.rollback(2)
    assert not matcher.finished and choices(matcher) == ("a", True)


def test_a_special_token_is_no_text(grammars, model):
    """Even where its spelling would fit, and it ends nothing."""
    assert model.tokenizer.token_bytes(EOS_ID, skip_special=False) == b"<eos>"
    matcher = Grammars(model, stop_ids=(EOS_ID + 1,)).regex("<[a-z]*>x")
    assert choices(matcher) == ("<", False)
    assert feed(matcher, "<eos>")


def test_white_space(grammars):
    text = json.dumps({"name": "Al", "age": 3}, indent=1)
    assert feed(grammars.json_schema(SCHEMA, separators=None), text)
    assert not feed(grammars.json_schema(SCHEMA), text)
    compact = json.dumps({"name": "Al", "age": 3}, separators=(",", ":"))
    assert feed(grammars.json_schema(json.dumps(SCHEMA), (",", ":")), compact)


def test_a_lark_grammar(grammars):
    matcher = grammars.lark('start: "(" start ")" | "x"')
    assert feed(matcher, "((x)") and choices(matcher) == (")", False)


def test_own_stop_ids(model, grammars):
    matcher = Grammars(model, stop_ids=(3, 257)).regex("a")
    assert feed(matcher, "a")
    words = matcher.allowed()
    assert words[0] == 1 << 3 and words[257 // 32] == 1 << 257 % 32
    assert matcher.advance(257) and matcher.finished


def test_grammars_that_are_none(grammars):
    with pytest.raises(ValueError, match="`pattern` is refused: .*unclosed"):
        grammars.regex("[ab")
    with pytest.raises(ValueError, match="`grammar` is refused: "):
        grammars.lark("start: nowhere")
    with pytest.raises(ValueError, match="`schema` is no JSON schema: "):
        grammars.json_schema("{")
    with pytest.raises(ValueError, match="`schema` is refused: "):
        grammars.json_schema({"type": "nothing"})


def test_models_that_have_no_grammars(model):
    with pytest.raises(ValueError, match="has no tokenizer"):
        Grammars(dataclasses.replace(model, tokenizer=None))
    for ids in [(), (VOCAB,)]:
        with pytest.raises(ValueError, match="allowed: one id or more, each below"):
            Grammars(model, stop_ids=ids)


def test_without_the_library(model, monkeypatch):
    real = importlib.import_module

    def missing(name, *rest):
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"pip install 'dspark-jax\[grammar\]'"):
        Grammars(model)
