"""Programs that compute other bits are found, and deterministic calls avoid them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.equivalence import Equivalence, Shape
from dspark_jax.decoding.equivalence_file import load_digests, save_digests
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.shapes import Shapes, choose_shapes
from dspark_jax.models import dense, layers
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.params import is_stacked
from dspark_jax.models.rows import dense_rows
from dspark_jax.probe import equivalence_of
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel

N, NEW = 2, 16
REAL = layers.matmul


@pytest.fixture(scope="module")
def model():
    config = dspark.testing.tiny_config(
        layers=1, hidden_size=16, num_heads=2, num_kv_heads=1
    )
    draft = dspark.testing.tiny_draft_config(config, gamma=N)
    return dspark.testing.tiny_model(target=config, draft=draft, seed=4, scale=4.0)


class Group:
    """Stands in for `Equivalence`: a group that is written down."""

    batch, capacity = 4, 1024

    def __init__(self, *outside):
        self.outside = outside
        self.asked = []

    def holds(self, shape):
        self.asked.append(shape)
        return not any(test(shape) for test in self.outside)


def chosen(model, known, count, n=N, capacity=256, **options):
    return choose_shapes(
        model.spec, known, count=count, draft_length=n, capacity=capacity, **options
    )


def test_where_all_agree_nothing_is_padded(model):
    every = (16, 64, 256)
    assert chosen(model, Group(), 1, 0) == Shapes(1, 256, every, (2,))
    assert chosen(model, Group(), 3) == Shapes(4, 256, every, (12,))
    assert chosen(model, Group(), 8) == Shapes(8, 256, every, (24,))
    rows = chosen(model, Group(), 2, scheduled=True).rows
    assert rows == (2, 4, 6)


def test_rows_batches_and_chunks_outside_the_group_are_padded(model):
    few = Group(lambda s: s.kind == "round" and s.rows < 3)
    assert chosen(model, few, 1, 0).rows == (3,)
    alone = Group(lambda s: s.batch == 1)
    assert chosen(model, alone, 1, 0) == Shapes(2, 256, (16, 64, 256), (2,))
    short = Group(lambda s: s.kind == "prefill" and s.rows == 16)
    assert chosen(model, short, 1).prefill == (64, 256)
    gap = Group(lambda s: s.kind == "round" and s.rows == 4)
    assert chosen(model, gap, 2, scheduled=True).rows == (2, 6)
    # Without a chunk that fits everywhere, or without room for whole blocks.
    late = Group(lambda s: s.kind == "prefill" and s.rows < 256 and s.batch < 4)
    assert chosen(model, late, 1).batch == 4
    narrow = Group(lambda s: s.kind == "round" and s.batch == 1 and s.rows == 3)
    assert chosen(model, narrow, 1).batch == 2


def test_where_nothing_agrees_everything_is_the_reference(model):
    spec = model.spec
    reference = Equivalence(spec, model.params, capacity=256)
    only = {reference.reference("round"), reference.reference("prefill")}
    known = Group(lambda s: s not in only)
    known.capacity = 256
    for count in (1, 4, 9, 32):
        for n in range(N + 1):
            for scheduled in (False, True):
                found = chosen(model, known, count, n, 128, scheduled=scheduled)
                assert found == Shapes(4, 256, (64,), (12,))


def test_what_cannot_be_padded_is_refused(model):
    tiles = Group(lambda s: s.capacity != 1024)
    assert chosen(model, tiles, 1).capacity == 1024
    with pytest.raises(ValueError, match="capacity.*256.*1024"):
        chosen(model, tiles, 1, fixed_capacity=True)
    with pytest.raises(ValueError, match="2048"):
        chosen(model, tiles, 1, capacity=2048)
    with pytest.raises(ValueError, match="batch 1"):
        chosen(model, Group(lambda s: s.batch == 1), 1, fixed_batch=True)


def test_drawn_tokens_keep_to_one_size(model):
    """The draft's own bits count there, and they are not probed."""
    known = Group()
    for count in (1, 3, 7):
        found = chosen(model, known, count, one_size=True)
        assert found == Shapes(4, 1024, (64,), (12,))
    assert known.asked == []
    with pytest.raises(ValueError, match="batch 2"):
        chosen(model, known, 2, one_size=True, fixed_batch=True)


def in_halves(x, weight):
    """Six rows are summed half by half."""
    if x.shape[0] != 6 or x.ndim != 2:
        return REAL(x, weight)
    half = x.shape[1] // 2
    parts = (x[:, :half], weight[:, :half]), (x[:, half:], weight[:, half:])
    first, second = (REAL(*part) for part in parts)
    return first + second


def test_another_order_of_summing_is_another_group(model, monkeypatch):
    monkeypatch.setattr(layers, "matmul", in_halves)
    known = Equivalence(model.spec, model.params, batch=2, capacity=128, inputs=4)
    # The reference of two requests is six rows wide: the others are the odd ones.
    assert known.reference("round") == Shape("round", 2, 6, 128)
    assert not known.holds(Shape("round", 2, 4, 128))
    assert known.holds(known.reference("round"))
    monkeypatch.setattr(layers, "matmul", REAL)
    straight = Equivalence(model.spec, model.params, batch=2, capacity=128, inputs=4)
    if not straight.holds(Shape("round", 2, 4, 128)):
        pytest.skip("this XLA sums four rows of floats in another order by itself")
    assert len(straight.groups) == 1 and len(known.groups) == 2
    assert straight.to_json()["groups"][0]["used"]
    # What was digested is what came out: two of three digests are the same.
    four = Shape("round", 2, 4, 128)
    assert straight.digests[four] == known.digests[four]
    assert len(set(straight.digests[four])) == 4


def loud(x, weight):
    """As if a program of two rows were another model."""
    return REAL(x, weight) * (1.5 if x.shape[0] == 2 and x.ndim == 2 else 1.0)


def tokens(model, prompts, **options):
    results = dspark.generate(
        model, prompts, max_new_tokens=NEW, chat=False, capacity=128, **options
    )
    return [one.tokens for one in results]


@pytest.fixture
def odd(model, monkeypatch):
    """A model whose programs of two rows are another model's, probed."""
    monkeypatch.setattr(layers, "matmul", loud)
    programs = Programs(model.spec, is_stacked(model.params["target"]))
    odd = dataclasses.replace(model, programs=programs)
    dspark.probe(
        odd, batches=[1], draft_length=0, needs=[128], batch=2, capacity=128, inputs=2
    )
    return odd


@pytest.mark.slow
def test_text_keeps_away_from_the_odd_program(odd):
    """Plainly decoded, one request has two rows: it is padded to two requests."""
    prompts, plain = ["ab", "hello"], dict(draft_length=0)
    together = tokens(odd, prompts, **plain, deterministic=True)
    alone = tokens(odd, prompts[:1], **plain, deterministic=True)
    assert alone == together[:1]
    # The control: without determinism the odd program is used.
    assert tokens(odd, prompts[:1], **plain) != together[:1]
    shown = odd.info()["equivalence"]
    assert shown["inputs"] == 2
    unused = [shape for group in shown["groups"] if not group["used"]
              for shape in group["shapes"]]  # fmt: skip
    assert [1, 2, 128] in unused


@pytest.mark.slow
def test_text_is_that_of_any_schedule(odd):
    """The reference holds two requests: three take turns."""
    prompts, plain = ["ab", "hello", "xyz"], dict(draft_length=0, deterministic=True)
    costs = CostModel(curve([2, 4, 6], [10.0, 10.5, 14.0]), draft_ms=1.0)
    budget = dict(policy=dspark.Budget(), costs=costs, deterministic=True)
    samplings = [dspark.SamplingParams(temperature=1.0, seed=i) for i in range(3)]
    for options in (
        dict(),
        dict(verification="shared_noise", sampling=samplings),
    ):
        together = tokens(odd, prompts, **options, **plain)
        assert tokens(odd, prompts, **options, **budget) == together
        fixed = tokens(odd, prompts, **options, draft_length=N, deterministic=True)
        assert fixed == together
        for index, prompt in enumerate(prompts):
            one = dict(options)
            if "sampling" in one:
                one["sampling"] = [samplings[index]]
            assert tokens(odd, [prompt], **one, **plain) == [together[index]]


def test_one_program_keeps_to_given_sizes(model, monkeypatch):
    """`generate_tokens` in padded sizes: padded rows and chunks change no token."""
    known = Group(
        lambda s: s.batch == 1,
        lambda s: s.kind == "prefill" and s.rows == 16,
        lambda s: s.kind == "round" and s.rows < 6,
    )
    monkeypatch.setattr(model.programs, "equivalence", known)
    shapes = dspark.deterministic_shapes(model, batch=1, capacity=128, draft_length=0)
    assert shapes == Shapes(2, 128, (64, 256), (6,))
    ids = jnp.asarray([[97, 98, 99], [97, 0, 0]], jnp.int32)
    lengths = jnp.asarray([3, 1], jnp.int32)

    def run(**options):
        return dspark.generate_tokens(
            model.spec, model.params, ids, lengths, max_new_tokens=6, draft_length=0,
            **options,
        ).tokens  # fmt: skip

    seen = set()

    def noted(x, weight):
        seen.add(x.shape[0])
        return REAL(x, weight)

    monkeypatch.setattr(layers, "matmul", noted)
    padded = jax.jit(lambda: run(shapes=shapes))()
    assert seen == {2 * 64, 6}
    np.testing.assert_array_equal(padded, jax.jit(run)())
    with pytest.raises(ValueError, match="shapes"):
        run(shapes=dataclasses.replace(shapes, batch=4))
    with pytest.raises(ValueError, match="shapes"):
        run(shapes=shapes, capacity=64)


@pytest.mark.slow
def test_what_was_found_is_kept_in_a_file(tmp_path, model, monkeypatch):
    path = tmp_path / "probe.json"
    key = {"device": "one", "inputs": 2}
    found = {
        Shape("round", 1, 2, 128): ("a", None),
        Shape("prefill", 1, 16, 9): ("b",) * 2,
    }
    save_digests(path, key, found)
    assert load_digests(path, key) == found
    assert load_digests(path, {**key, "device": "other"}) == {}
    assert load_digests(tmp_path / "none.json", key) == {}
    path.write_text("[]")
    assert load_digests(path, key) == {}

    options = dict(
        batches=[2], draft_length=0, needs=[128], batch=2, capacity=128, inputs=2,
        cache=path,
    )  # fmt: skip
    first = dspark.probe(model, **options)
    assert equivalence_of(model) is first
    monkeypatch.setattr("dspark_jax.decoding.probing.Probe.digests", None)
    assert dspark.probe(model, **options).digests == first.digests
    # Other weights are another model.
    with pytest.raises(TypeError):
        dspark.probe(dspark.testing.tiny_model(target=model.spec.target), **options)


@pytest.mark.parametrize(("name", "value"), [("batch", 3), ("inputs", 0)])
def test_bad_references(model, name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        dspark.probe(model, **{name: value})


def test_prompts_are_fed_in_the_given_sizes_also_those_that_join(model, monkeypatch):
    """Chunks of 16 and single requests are outside; three prompts share two places."""
    known = Group(
        lambda s: s.batch == 1,
        lambda s: s.kind == "prefill" and s.rows == 16,
    )
    monkeypatch.setattr(model.programs, "equivalence", known)
    fed, real = [], Programs.feed

    def noted(self, params, state, logits, tokens, lengths):
        fed.append(tokens.shape)
        return real(self, params, state, logits, tokens, lengths)

    monkeypatch.setattr(Programs, "feed", noted)
    options = dict(max_new_tokens=2, chat=False, draft_length=0, capacity=128, batch=2)
    dspark.generate(model, ["a", "bc", "d"], deterministic=True, **options)
    assert fed == [(2, 64), (2, 64)]
    fed.clear()
    # Control: otherwise the smallest sizes will do.
    dspark.generate(model, ["a", "bc", "d"], **options)
    assert fed == [(2, 16), (1, 16)]


def test_the_head_never_sees_a_single_row(model, monkeypatch):
    """XLA on CPU multiplies one row in another order than two."""
    seen, real = [], dense.head_logits

    def noted(config, x, table):
        seen.append(len(x))
        return real(config, x, table)

    monkeypatch.setattr(dense, "head_logits", noted)
    spec, last = model.spec, jnp.zeros((1,), jnp.int32)
    cache = empty_cache(spec.target, 1, 128, jnp.dtype("float32"), False)
    rows = dense_rows(jnp.zeros((1, 16), jnp.int32), last + 16, last)
    logits, _, _ = jax.eval_shape(
        lambda: dense.evaluate(
            spec.target, model.params["target"], cache, 128, rows, (), last
        )
    )
    assert seen == [2] and logits.shape == (1, spec.target.vocab_size)
