"""Named shapes of the verification ops, shared by tests and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """Rows judged together, and their vocabulary."""

    rows: int
    vocab: int


class Drafting(NamedTuple):
    """What the drafts of a round are drawn from: `drafts` rows a request, in turn."""

    requests: int
    drafts: int
    vocab: int


SHAPES = {
    # As the default model is served: three drafts and the fresh row.
    "smollm2_three_drafts": Shape(4, 49_152),
    # One request, five drafts and the fresh row, SmolLM2's vocabulary.
    "smollm2_one_request": Shape(6, 49_152),
    "smollm2_eight_requests": Shape(48, 49_152),
    # Qwen3's padded vocabulary, seven drafts.
    "qwen3_one_request": Shape(8, 151_936),
    "deepseek_one_request": Shape(6, 129_280),
    # Not a multiple of 128: a GPU reads such rows value by value.
    "gpt2_unpadded": Shape(6, 50_257),
    # Small and odd: a tile is 256 ids.
    "odd": Shape(5, 1_003),
    "tiny": Shape(3, 100),
}

# How the drafts of a shape's rows come about.
DRAFTING = {
    # The shipped draft knows a third of the vocabulary.
    "smollm2_three_drafts": Drafting(1, 3, 16_384),
    "smollm2_one_request": Drafting(1, 5, 16_384),
    "smollm2_eight_requests": Drafting(8, 5, 16_384),
    "qwen3_one_request": Drafting(1, 7, 151_936),
    "deepseek_one_request": Drafting(1, 5, 129_280),
}
