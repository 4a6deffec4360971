"""Small models for tests and examples: random, scripted, with a byte tokenizer."""

from dspark_jax.testing.scripted import scripted_model as scripted_model
from dspark_jax.testing.selection import SmallModel as SmallModel
from dspark_jax.testing.selection import emitted_law as emitted_law
from dspark_jax.testing.selection import foresight as foresight
from dspark_jax.testing.selection import is_lossless as is_lossless
from dspark_jax.testing.selection import lagged_law as lagged_law
from dspark_jax.testing.tiny import byte_tokenizer as byte_tokenizer
from dspark_jax.testing.tiny import tiny_config as tiny_config
from dspark_jax.testing.tiny import tiny_draft_config as tiny_draft_config
from dspark_jax.testing.tiny import tiny_model as tiny_model
