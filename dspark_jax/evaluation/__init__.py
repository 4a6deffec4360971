"""Prompts, what stands of a draft on them, and plain against speculative decoding."""

from dspark_jax.evaluation.acceptance import Acceptance as Acceptance
from dspark_jax.evaluation.acceptance import acceptance as acceptance
from dspark_jax.evaluation.acceptance import rounds_of as rounds_of
from dspark_jax.evaluation.acceptance_sweep import sweep as sweep
from dspark_jax.evaluation.compare import Summary as Summary
from dspark_jax.evaluation.compare import compare as compare
from dspark_jax.evaluation.compare import summarise as summarise
from dspark_jax.evaluation.compare import warm_up as warm_up
from dspark_jax.evaluation.evaluate import Evaluation as Evaluation
from dspark_jax.evaluation.evaluate import evaluate as evaluate
from dspark_jax.evaluation.gather import gather as gather
from dspark_jax.evaluation.prompts import DOMAINS as DOMAINS
from dspark_jax.evaluation.prompts import held_out as held_out
from dspark_jax.evaluation.prompts import random_prompts as random_prompts
from dspark_jax.evaluation.timing import TimedPrograms as TimedPrograms
