"""Decisions equal those of the published engine: experts, entries, mixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models import deepseek_v4
from dspark_jax.models.deepseek_v4.experts import Experts
from dspark_jax.models.deepseek_v4.hyper import HyperConnection
from dspark_jax.models.deepseek_v4.indexer import Indexer
from dspark_jax.models.rows import dense_rows
from tests.deepseek_v4.goldens import FLOAT, LIMIT, arrays, difference, target
from tests.models.quick import quick_jit


@pytest.fixture(scope="module")
def seen():
    """What layers chose for prompt A, in the order of the layers."""
    config, params = target()
    ids = arrays("hf_prefill")["prompt_a"]
    found = {"experts": [], "weights": [], "entries": [], "mixtures": []}

    def watch(patch, kind, name, pick):
        original = kind.__dict__[name]

        def watched(self, *args):
            out = original(self, *args)
            for key, value in pick(args, out).items():
                found[key].append(value)
            return out

        patch.setattr(kind, name, watched)

    def run(params, tokens):
        for values in found.values():
            values.clear()
        zero = jnp.zeros((1,), jnp.int32)
        rows = dense_rows(tokens[None], zero + tokens.shape[0], zero)
        state = deepseek_v4.empty_state(config, 1, 48, FLOAT)
        deepseek_v4.evaluate(config, params, state, 48, rows)
        return {key: list(values) for key, values in found.items()}

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, Experts, "__call__",
              lambda args, out: {"experts": args[1], "weights": args[2]})  # fmt: skip
        watch(patch, Indexer, "__call__", lambda args, out: {"entries": out[0]})
        watch(patch, HyperConnection, "mixtures",
              lambda args, out: {"mixtures": out})  # fmt: skip
        return jax.tree.map(np.asarray, quick_jit(run)(params, jnp.asarray(ids)))


def test_experts_and_their_weights(seen):
    gold = arrays("native_prefill")
    for layer in range(6):
        ids, want = seen["experts"][layer], gold[f"a.route_idx_L{layer}"]
        assert (np.sort(ids, axis=1) == np.sort(want, axis=1)).all(), layer
        # The reference does not say in which order it keeps them.
        order, wanted = np.argsort(ids, axis=1), np.argsort(want, axis=1)
        weights = np.take_along_axis(seen["weights"][layer], order, axis=1)
        stored = np.take_along_axis(gold[f"a.route_w_L{layer}"], wanted, axis=1)
        assert difference(weights, stored) <= LIMIT


def test_entries(seen):
    gold = arrays("native_prefill")
    slots, prompt = 48 // 4, 45
    for place, layer in enumerate((2, 4)):
        for row, (mine, theirs) in enumerate(
            zip(seen["entries"][place][0], gold[f"a.topk_L{layer}"], strict=True)
        ):
            # The reference counts entries behind the prompt's keys.
            wanted = sorted(int(i) - prompt for i in theirs if i >= 0)
            assert [i for i in mine if i < slots] == wanted, (layer, row)


def test_mixtures(seen):
    gold = arrays("native_prefill")
    for layer in (0, 3):
        # Two hyper-connections a layer, the attention's first.
        _, post, mix = seen["mixtures"][2 * layer]
        name = f"a.hc_L{layer}_attn."
        assert difference(post, gold[name + "post"]) <= LIMIT
        assert difference(mix, gold[name + "comb"]) <= LIMIT
        # Doubly stochastic, columns the more exactly; not symmetric.
        assert np.abs(mix.sum(axis=1) - 1).max() <= 1e-5
        assert difference(mix, mix.transpose(0, 2, 1)) > 0.05
