"""The log of rounds against recorded generations of the reference."""

import functools

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.extras import Extras
from dspark_jax.run import Call, run
from dspark_jax.transcript import Transcript
from tests.decoding.test_traces import TRAINED, rounds_within, stop_ids
from tests.models.goldens import arrays, error, pair


@functools.cache
def logged():
    """{trace: log} of the greedy traces of the trained pair, by the host loop."""
    model = pair("trained")
    batch = [arrays(f"qwen3_trained/{name}") for name in TRAINED]
    settings = [dspark.SamplingParams(stop_ids=stop_ids(trace)) for trace in batch]
    seeds = np.zeros((len(batch), 2), np.uint32)
    call = Call(settings, seeds, model.spec.gamma, 128, 96, Extras(trace=True), False)
    tokenizer = dspark.testing.byte_tokenizer()
    transcripts = [Transcript(tokenizer, (), model.spec.gamma) for _ in batch]
    prompts = [trace["prompt_ids"].tolist() for trace in batch]
    pieces = run(model, prompts, call, transcripts, None)
    logs = {TRAINED[p.index]: p.result.rounds for p in pieces if p.result}
    return {name: (arrays(f"qwen3_trained/{name}"), logs[name]) for name in TRAINED}


@pytest.mark.slow
def test_the_log_of_recorded_generations():
    for name, (trace, logs) in logged().items():
        limit = 10 if "short" in name else 96
        count, kept = rounds_within(trace, limit)
        if "short" in name:
            # One limit serves the batch; this request went on behind the trace's.
            count, kept, logs = count - 1, kept[:-1], logs[: count - 1]
        assert [one.accepted for one in logs] == kept
        assert [one.position - 1 for one in logs] == trace["start"][:count].tolist()
        stored = trace["confidence_logits"][:count]
        assert error(np.asarray([one.confidence for one in logs]), stored) <= 1e-4
        stopped = trace["terminated_by_stop"][:count].tolist()
        assert [one.stopped for one in logs] == stopped
        emitted = trace["acceptance_lengths"][:count].tolist()
        # The reference counts tokens past the limit.
        assert [one.emitted for one in logs[:-1]] == emitted[:-1]
        if any(stopped):
            assert logs[-1].emitted == emitted[-1] == logs[-1].accepted
