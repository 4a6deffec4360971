"""Rebuilding a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from dspark_jax.text.tokenizer import Tokenizer

# Token types of the format.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# Split patterns of the published tokenizers, one regular expression each.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _CL100K.format(digits="{1,3}")
_QWEN2 = _CL100K.format(digits="")

# `tokenizer.ggml.pre` to the patterns that cut the text, one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe"}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds a tokenizer from GGUF keys and values.

    Args:
        metadata: the keys `tokenizer.*` of the file; arrays as sequences.

    Raises:
        ValueError: a key is missing, or the file has another kind of tokenizer than
            byte-level BPE with a known way to split text.
    """
    model = _required(metadata, "tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"the GGUF tokenizer is of model {model!r}; allowed: 'gpt2' (byte-level "
            "BPE). For this one use the published tokenizer.json"
        )
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    pre = _SAME.get(pre, pre)
    if pre not in _SPLITS:
        raise ValueError(
            f"`tokenizer.ggml.pre` is {pre!r}; allowed: "
            f"{', '.join(sorted(_SPLITS.keys() | _SAME.keys()))}. For this one use "
            "the published tokenizer.json"
        )
    tokens = [str(token) for token in _required(metadata, "tokenizer.ggml.tokens")]
    backend = tokenizers.Tokenizer(_bpe(metadata, tokens, pre))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    _add_tokens(backend, metadata, tokens)
    _add_bos(backend, metadata, tokens, pre)
    return Tokenizer(
        backend=backend,
        eos_ids=_eos_ids(metadata),
        special_tokens=_special_tokens(metadata, tokens),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"the GGUF metadata has no `{key}`; is it a vocabulary file?")
    return metadata[key]


def _bpe(metadata: Mapping[str, Any], tokens: list[str], pre: str) -> BPE:
    merges = []
    for merge in _required(metadata, "tokenizer.ggml.merges"):
        # The first part may itself begin with the separator.
        cut = str(merge).find(" ", 1)
        if cut < 0:
            raise ValueError(f"`tokenizer.ggml.merges` has {merge!r}; allowed: 'a b'")
        merges.append((merge[:cut], merge[cut + 1 :]))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as a whole, whatever the merges say.
    return BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe")


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in _SPLITS[pre]
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


def _add_tokens(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]
) -> None:
    """Tokens that are recognised as a whole in the text; they keep their ids."""
    types = metadata.get("tokenizer.ggml.token_type")
    types = [_NORMAL] * len(tokens) if types is None else [int(t) for t in types]
    if len(types) != len(tokens):
        raise ValueError(
            f"`tokenizer.ggml.token_type` has {len(types)} entries; "
            f"`tokenizer.ggml.tokens` has {len(tokens)}"
        )
    for kind in (_CONTROL, _USER_DEFINED):
        special = kind == _CONTROL
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(tokens, types, strict=True)
            if token_kind == kind
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _add_bos(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    tokens: list[str],
    pre: str,
) -> None:
    # Files that say nothing mean what their tokenizer family does.
    if not metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        return
    bos_id = int(_required(metadata, "tokenizer.ggml.bos_token_id"))
    bos = tokens[bos_id]
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, bos_id)],
    )


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message: each ends generation."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return tuple(sorted({int(metadata[key]) for key in keys if key in metadata}))


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return {
        f"{name}_token": tokens[int(metadata[key])]
        for written, name in names.items()
        if (key := f"tokenizer.ggml.{written}_token_id") in metadata
    }
