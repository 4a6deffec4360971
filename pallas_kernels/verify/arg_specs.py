"""Named shapes of the verification ops, shared by tests and benchmarks."""

from typing import NamedTuple


class Shape(NamedTuple):
    """Rows judged together, and their vocabulary."""

    rows: int
    vocab: int


SHAPES = {
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
