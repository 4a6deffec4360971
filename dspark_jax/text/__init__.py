"""Text in and out: tokenizers, chat templates, streaming, stop strings."""

from dspark_jax.text.chat import next_turn as next_turn
from dspark_jax.text.chat import render_chat as render_chat
from dspark_jax.text.gguf_tokenizer import tokenizer_from_gguf as tokenizer_from_gguf
from dspark_jax.text.loading import load_tokenizer as load_tokenizer
from dspark_jax.text.stop_strings import StopMatch as StopMatch
from dspark_jax.text.stop_strings import StopMatcher as StopMatcher
from dspark_jax.text.stream_decoder import StreamDecoder as StreamDecoder
from dspark_jax.text.tokenizer import Tokenizer as Tokenizer
