"""Held-out prompts, and plain against speculative decoding on them."""

from dspark_jax.evaluation.compare import Summary as Summary
from dspark_jax.evaluation.compare import compare as compare
from dspark_jax.evaluation.compare import summarise as summarise
from dspark_jax.evaluation.compare import warm_up as warm_up
from dspark_jax.evaluation.prompts import DOMAINS as DOMAINS
from dspark_jax.evaluation.prompts import held_out as held_out
from dspark_jax.evaluation.prompts import random_prompts as random_prompts
from dspark_jax.evaluation.timing import TimedPrograms as TimedPrograms
