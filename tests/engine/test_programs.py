"""What the compiled and traced programs hold: donation, copies, large values."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import round as round_module
from dspark_jax.decoding.drafting import draft_next
from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.requests import pack_requests
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.state import new_state
from dspark_jax.decoding.words import round_words
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.layers import matmul
from dspark_jax.models.params import for_cpu, random_params
from dspark_jax.settings import SamplingParams
from dspark_jax.testing import tiny_config, tiny_draft_config

BATCH = 8


def requests(batch):
    return pack_requests(
        [SamplingParams()] * batch, np.zeros((batch, 2), np.uint32), ()
    )


def compiled_round(model):
    """The greedy round of the compile table, as text."""
    dspark.generate(model, ["ab"] * BATCH, max_new_tokens=2, chat=False)
    key = ("round", BATCH, 128, model.spec.gamma, "greedy", Extras())
    return model.programs._compiled[key].as_text() or ""


def copies(text, shape):
    dims = ",".join(map(str, shape))
    return re.findall(rf"= f32\[{dims}\]\S* copy\(", text)


def aliased_parameters(text):
    header = text.split("\n", 1)[0]
    start = header.index("input_output_alias={")
    return set(re.findall(r"\((\d+), \{\}, \w+-alias\)", header[start:]))


def test_fr51_caches_are_aliased(model):
    text = compiled_round(model)
    state = model.programs.init(BATCH, 128, model.spec.gamma)
    leaves = jax.tree.leaves((state.target, state.draft))
    dims = ",".join(map(str, leaves[0].shape))
    entry = text[text.index("ENTRY") :]
    caches = re.findall(rf"f32\[{dims}\]\S* parameter\((\d+)\)", entry)
    assert len(caches) == len(leaves) == 4
    # All that a round reads of its state is returned in place; of the proposal
    # that is the ids.
    aliased = aliased_parameters(text)
    assert set(caches) <= aliased
    assert len(aliased) == len(jax.tree.leaves(state)) + 1


def test_fr51_caches_are_never_copied(model, monkeypatch):
    shape = jax.tree.leaves(model.programs.init(BATCH, 128, 2).target)[0].shape
    assert copies(compiled_round(model), shape) == []
    # Control: without the ordering the caches are copied first.
    monkeypatch.setattr("jax.lax.optimization_barrier", lambda x: x)
    monkeypatch.setattr(round_module, "_behind", lambda start, _: start, raising=False)
    fresh = dspark.make_model(model.spec, model.params, model.tokenizer)
    assert copies(compiled_round(fresh), shape)


def test_fr51_no_donation_is_refused(model, recwarn):
    dspark.generate(model, ["ab"] * 3, max_new_tokens=6, chat=False)
    assert [str(w.message) for w in recwarn] == []

    # Control: jax does warn about a donation it cannot use.
    def shrink(x):
        return x[:1]

    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        jax.jit(shrink, donate_argnums=0).lower(np.zeros(8, np.float32)).compile()


def abstract(spec):
    """Shapes of the parameters, layers listed as on CPU."""
    trees = {
        "target": dense.abstract_params(spec.target),
        "draft": backbone.abstract_draft_params(spec.draft),
    }

    def init(key):
        listed = {k: for_cpu(random_params(t, key)) for k, t in trees.items()}
        return listed

    return jax.eval_shape(init, jax.random.key(0))


def values(jaxpr):
    """Shapes of everything that a jaxpr computes, inner jaxprs included."""
    for equation in jaxpr.eqns:
        for out in equation.outvars:
            yield tuple(getattr(out.aval, "shape", ()))
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from values(inner)


def repeated_heads(shapes, heads, context, dim):
    """Values as large as keys of `context` positions for every query head."""
    return [
        shape for shape in shapes if np.prod(shape, initial=1) >= heads * context * dim
    ]


@pytest.mark.parametrize("whole_round", [False, True])
def test_fr27_heads_are_not_repeated_over_the_context(whole_round):
    heads, context, gamma = 8, 1024, 2
    config = tiny_config(layers=1, hidden_size=64, num_heads=heads, num_kv_heads=2)
    spec = dspark.Spec(config, tiny_draft_config(config, gamma=gamma))
    dim = config.attention("full").head_dim
    asked = requests(1)

    def step(params, state):
        words = round_words(asked.seeds, state.length + 1, gamma)
        proposal = draft_next(
            spec, params, state, asked, words.draft[:, 0], gamma, "greedy"
        )
        if not whole_round:
            return proposal
        state = dataclasses.replace(state, proposal=proposal)
        return decode_round(spec, params, state, asked, words, gamma, "greedy")

    params = abstract(spec)
    state = jax.eval_shape(lambda: new_state(spec, 1, context, gamma, stacked=False))
    shapes = list(values(jax.make_jaxpr(step)(params, state).jaxpr))
    assert len(shapes) > 50
    assert repeated_heads(shapes, heads, context, dim) == []

    # Control: the wrong version is found.
    def repeating(state):
        return jnp.repeat(jax.tree.leaves(state.draft)[0], 4, axis=1)

    wrong = values(jax.make_jaxpr(repeating)(state).jaxpr)
    assert repeated_heads(wrong, heads, context, dim)


@pytest.mark.parametrize("draft_length", [0, 4])
def test_fr37_no_logits_of_the_whole_text_are_kept(draft_length):
    vocab, new, batch = 1000, 256, 2
    config = tiny_config(layers=1, vocab_size=vocab, hidden_size=16, num_heads=2)
    spec = dspark.Spec(config, tiny_draft_config(config, gamma=4))

    def run(params, tokens, lengths):
        return dspark.generate_tokens(
            spec,
            params,
            tokens,
            lengths,
            max_new_tokens=new,
            draft_length=draft_length,
            sampling=SamplingParams(temperature=1.0, top_p=0.9),
            logprobs=True,
        )

    tokens, lengths = np.zeros((batch, 9), np.int32), np.ones(batch, np.int32)
    shapes = set(values(jax.make_jaxpr(run)(abstract(spec), tokens, lengths).jaxpr))
    assert (batch, vocab) in shapes
    assert [s for s in shapes if {new, vocab} <= set(s)] == []
    # Nothing is larger than a round's logits, tiled for summing.
    largest = max(np.prod(s) for s in shapes if vocab in s)
    assert largest <= max(batch * (4 + 1), 16) * vocab

    # Control: a head over all new positions is found.
    def wrong(params):
        rows = jnp.zeros((batch, new, 16))
        return matmul(rows, params["target"]["lm_head"]["weight"])

    shapes = set(values(jax.make_jaxpr(wrong)(abstract(spec)).jaxpr))
    assert [s for s in shapes if {new, vocab} <= set(s)]
