"""Text that the target writes: what is in it, and that nothing but the seed matters."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.words import seed_words
from dspark_jax.testing import byte_tokenizer, tiny_config, tiny_model
from dspark_jax.testing.tiny import EOS_ID
from dspark_jax.text import render_chat
from dspark_jax.training.data_plan import DataConfig, Plan, parse_temperatures, spread
from dspark_jax.training.generate_data import generate_data
from dspark_jax.training.rollout import Job, Written, roll_out
from dspark_jax.training.sequences import ANSWER, FORCED, PADDING, QUESTION
from dspark_jax.training.sequences import read_sequences as read
from dspark_jax.training.turns import Turns, invented_turns

PROMPTS = ["ab", "the sun", [{"role": "user", "content": "zz"}], "q", "1 + 1"]
LENGTH = 56


@pytest.fixture(scope="module")
def model():
    """A tiny target that ends its turns every dozen tokens."""
    made = tiny_model(target=tiny_config(layers=1, eos_ids=(EOS_ID, 7)), seed=3)
    params = dict(made.params["target"])
    head = np.array(params["lm_head"]["weight"])
    # The mean direction of some rows: the end is likely where they are.
    head[EOS_ID] = head[40:44].sum(axis=0)
    params["lm_head"] = {"weight": head}
    spec = dspark.Spec(made.spec.target)
    return dspark.make_model(spec, {"target": params}, made.tokenizer, "tiny")


def _config(**changes) -> DataConfig:
    base = DataConfig(sequences=14, length=LENGTH, batch=4, shard=6, seed=5)
    return dataclasses.replace(base, **changes)


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """A folder with questions by the model in it."""
    folder = tmp_path_factory.mktemp("data") / "text"
    report = generate_data(model, PROMPTS, folder, _config(invent=0.45))
    return folder, report


def _equal(a, b) -> None:
    for field in ("tokens", "role", "temperature", "prompt"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_an_interrupted_run_goes_on_to_the_same_bits(model, written, tmp_path):
    class Interrupted(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 6 * LENGTH + 40:
            raise Interrupted

    config = _config(invent=0.45)
    with pytest.raises(Interrupted):
        generate_data(model, PROMPTS, tmp_path, config, progress=stop)
    # Nothing of the second shard is there.
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["data.json", "part-00000.npz"]
    first = (tmp_path / "part-00000.npz").stat().st_mtime_ns
    seen = []
    report = generate_data(
        model, PROMPTS, tmp_path, config, progress=lambda *at: seen.append(at)
    )
    assert (tmp_path / "part-00000.npz").stat().st_mtime_ns == first
    _equal(read(tmp_path), read(written[0]))
    assert seen[0][0] > 6 * LENGTH and seen[-1] == (14 * LENGTH, 14 * LENGTH)
    whole = written[1]
    assert report.new < whole.new == whole.answer + whole.question
    again = generate_data(model, PROMPTS, tmp_path, config)
    assert again.new == 0 and again.tokens_per_second is None


def test_more_sequences_go_on_behind_the_others(model, written, tmp_path):
    generate_data(model, PROMPTS, tmp_path, _config(invent=0.45, sequences=9))
    generate_data(model, PROMPTS, tmp_path, _config(invent=0.45))
    _equal(read(tmp_path), read(written[0]))
    with pytest.raises(ValueError, match="`sequences` is 9; .* is for 14"):
        generate_data(model, PROMPTS, tmp_path, _config(invent=0.45, sequences=9))


def test_other_settings_are_refused_by_name(model, written):
    folder, _ = written
    before = (folder / "data.json").read_text()
    for changes, message in [
        ({"seed": 6}, "seed 5, now 6"),
        ({"length": 48}, "length 56, now 48"),
        ({"invent": 0.5}, "invent 0.45, now 0.5"),
        ({"temperatures": ((1.0, 1),)}, "temperatures .*, now"),
        ({"batch": 2, "shard": 7}, "batch 4, now 2; shard 6, now 7"),
    ]:
        config = _config(**({"invent": 0.45} | changes))
        with pytest.raises(ValueError, match=message):
            generate_data(model, PROMPTS, folder, config)
    with pytest.raises(ValueError, match="other settings: prompts"):
        generate_data(model, PROMPTS[:-1], folder, _config(invent=0.45))
    renamed = dataclasses.replace(model, name="another")
    with pytest.raises(ValueError, match="model name 'tiny', now 'another'"):
        generate_data(renamed, PROMPTS, folder, _config(invent=0.45))
    assert (folder / "data.json").read_text() == before
    assert json.loads(before)["seed"] == 5


def test_shards_without_settings_are_not_touched(model, written, tmp_path):
    shard = (written[0] / "part-00000.npz").read_bytes()
    (tmp_path / "part-00000.npz").write_bytes(shard)
    with pytest.raises(ValueError, match=r"part-00000\.npz but no data\.json"):
        generate_data(model, PROMPTS, tmp_path, _config())
    assert [file.name for file in tmp_path.iterdir()] == ["part-00000.npz"]


def test_a_sequence_is_the_same_in_another_batch(model, written, tmp_path):
    generate_data(model, PROMPTS, tmp_path, _config(invent=0.45, batch=2, shard=14))
    _equal(read(tmp_path), read(written[0]))


def test_another_seed_is_another_text(model, written, tmp_path):
    generate_data(model, PROMPTS, tmp_path, _config(invent=0.45, seed=6))
    text, other = read(written[0]), read(tmp_path)
    same = (text.tokens == other.tokens).all(axis=1)
    drawn = text.temperature > 0
    assert not same[drawn].any()
    # Greedy answers to given prompts know no seed, up to the first invented turn.
    given = (text.temperature == 0) & (text.prompt >= 0)
    assert given.any()
    for row in np.flatnonzero(given):
        end = int((text.role[row] == ANSWER).argmax()) + 1
        assert (text.tokens[row, :end] == other.tokens[row, :end]).all()
    # Questions are drawn at temperature 1, those of greedy answers too.
    invented = (text.temperature == 0) & (text.prompt < 0)
    assert invented.any() and not same[invented].any()


def _turns(role: np.ndarray) -> list[tuple[int, int, int]]:
    """(role, begin, end) of every run of one role."""
    cuts = [0, *(np.flatnonzero(np.diff(role.astype(int))) + 1).tolist(), len(role)]
    return [(int(role[a]), a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def test_roles_say_who_wrote_what(model, written):
    text, tokenizer = read(written[0]), byte_tokenizer()
    seen = set()
    for row in range(len(text)):
        tokens, prompt = text.tokens[row].tolist(), int(text.prompt[row])
        if prompt < 0:
            opening = tokenizer.encode("user: ", special=False)
        else:
            chat = render_chat(tokenizer, PROMPTS[prompt])
            opening = tokenizer.encode(chat, special=False)
        runs = _turns(text.role[row])
        assert runs[0] == (FORCED, 0, len(opening))
        assert tokens[: len(opening)] == opening
        kind = QUESTION if prompt < 0 else ANSWER
        for number, (role, begin, end) in enumerate(runs[1:], 1):
            last = number == len(runs) - 1
            if role == FORCED:
                header = "assistant: " if kind == ANSWER else "user: "
                whole = tokenizer.encode(header, special=False)
                assert tokens[begin:end] == (whole[: end - begin] if last else whole)
            elif role == PADDING:
                # Another stop token than the one that closes turns.
                assert last and tokens[begin - 1] == 7
                assert set(tokens[begin:]) == {0}
            else:
                assert role == kind
                # The end belongs to the turn, and nothing follows it there.
                stops = [i for i in range(begin, end) if tokens[i] in (EOS_ID, 7)]
                assert stops == ([] if last and not stops else [end - 1])
                kind = QUESTION + ANSWER - kind
            seen.add((role, last))
    # All of it happened.
    assert {(FORCED, False), (QUESTION, False), (ANSWER, False)} <= seen


def _write(draws: list[int], answers: int | None, length: int = 20) -> Written:
    turns = Turns(opening=(1, 2), answer_header=(3,), question_header=(4, 5), close=9)
    job = Job((1, 2), True, 0.5, np.zeros(2, np.uint32), -1)
    one = Written(job, length, (8, 9), turns, answers)
    for drawn in draws:
        assert not one.over
        one.take(drawn)
    return one


def test_turns_follow_each_other():
    # -1: drawn where the next token is known, and dropped.
    ask, answer = [-1, 60, 9], [-1, 61, 9]
    again = [-1, -1, 62, 9]
    one = _write(ask, None)
    assert one.tokens == [1, 2, 60, 9, 3] and one.temperature == 0.5
    one = _write([*ask, *answer], None)
    assert one.tokens == [1, 2, 60, 9, 3, 61, 9, 4, 5] and not one.over
    assert one.roles == [0, 0, 1, 1, 0, 2, 2, 0, 0] and one.temperature == 1.0
    one = _write([*ask, *answer, *again, *answer], 2)
    assert one.tokens == [1, 2, 60, 9, 3, 61, 9, 4, 5, 62, 9, 3, 61, 9] and one.over
    assert one.roles == [0, 0, 1, 1, 0, 2, 2, 0, 0, 1, 1, 0, 2, 2]
    assert _write([*ask, *answer], 1).tokens[-2:] == [61, 9]
    # Another stop token ends the sequence, and so does its length.
    assert _write([-1, 60, 8], None).over
    assert _write([*ask, -1, 61, 8], None).over
    one = _write([*ask, -1, 61], None, length=6)
    assert one.tokens == [1, 2, 60, 9, 3, 61] and one.over
    assert _write([*ask, *answer], None, length=8).tokens[-2:] == [9, 4]


def test_a_row_goes_on_behind_tokens_that_it_has_fed(model):
    # The last token of a sequence was never fed: the next one may not skip it.
    def job(opening: list[int]) -> Job:
        return Job(tuple(opening), False, 1.0, np.array([3, 4], np.uint32), 0)

    def run(jobs: list[Job]) -> list[list[int]]:
        done = roll_out(
            model, jobs, batch=4, length=LENGTH, variant="sampled", answers=1
        )
        return [one.tokens for _, one in sorted(done, key=lambda pair: pair[0])]

    first = run([job([97, 98])])[0]
    assert len(first) < LENGTH - 10
    later = job([*first, 99])
    assert run([*[job([97, 98])] * 4, *[later] * 4])[4:] == run([later] * 4)
    one = Written(later, LENGTH, (), None, None)
    one.skip(first[:-1])
    assert one.cursor == len(first) - 1
    one.skip([*first, 99, 5])
    # The last known token is fed in any case.
    assert one.cursor == len(first)


def test_one_answer_ends_with_its_stop_token(model, tmp_path):
    report = generate_data(model, PROMPTS, tmp_path, _config())
    text = read(tmp_path)
    assert text.prompt is not None and text.prompt.tolist() == [*range(5)] * 2 + [
        0, 1, 2, 3,
    ]  # fmt: skip
    ended = 0
    for row in range(len(text)):
        runs = _turns(text.role[row])
        assert [role for role, _, _ in runs] in (
            [FORCED, ANSWER], [FORCED, ANSWER, PADDING],
        )  # fmt: skip
        _, begin, end = runs[1]
        stops = np.isin(text.tokens[row, begin:end], (EOS_ID, 7))
        assert not stops[:-1].any()
        assert end == LENGTH or stops[-1]
        ended += end < LENGTH
    assert ended > 2
    assert report.question == 0 and report.padding == (text.role == PADDING).sum()
    assert 0 < report.padding_share < 1


@pytest.mark.slow
def test_answers_equal_those_of_generate(model, tmp_path):
    # Prompts in one go instead of token by token, and another cache.
    config = _config(sequences=5)
    generate_data(model, PROMPTS, tmp_path, config)
    text, plan = read(tmp_path), Plan(model, PROMPTS, config)
    seeds = [(int(a) << 32) + int(b) for a, b in (plan.job(i).seed for i in range(5))]
    sampling = [
        dspark.SamplingParams(temperature=float(heat), seed=seed)
        for heat, seed in zip(text.temperature, seeds, strict=True)
    ]
    assert sum(one.greedy for one in sampling) == 2
    results = dspark.generate(model, PROMPTS, sampling=sampling, max_new_tokens=LENGTH)
    for row, result in enumerate(results):
        answer = text.tokens[row][text.role[row] == ANSWER].tolist()
        assert answer == result.tokens[: len(answer)]
        if len(answer) < len(result.tokens):
            assert text.lengths[row] == LENGTH


def test_seeds_are_those_of_generate(model):
    # A list of prompts with one seed draws from fold(seed, index).
    high, low = seed_words(5)
    key = jax.random.wrap_key_data(
        jnp.asarray([high, low], jnp.uint32), impl="threefry2x32"
    )
    plan = Plan(model, PROMPTS, _config())
    for index in (0, 3):
        words = jax.random.key_data(jax.random.fold_in(key, index))
        np.testing.assert_array_equal(plan.job(index).seed, words)


def test_temperatures_take_turns(written):
    order = spread(DataConfig(1).temperatures)
    assert sorted(order) == [0.0, 0.0, 0.0, 0.7, 1.0, 1.0]
    text = read(written[0])
    # Prompts that come again take another one than index 13 would.
    assert text.prompt is not None
    again = np.cumsum(text.prompt >= 0) > len(PROMPTS)
    wanted = [order[(i + (a and p >= 0)) % 6] for i, (a, p) in enumerate(
        zip(again, text.prompt, strict=True))]  # fmt: skip
    np.testing.assert_array_equal(text.temperature, np.float32(wanted))
    assert spread([(0.5, 4), (1.0, 2)]) == [0.5, 1.0, 0.5]
    assert parse_temperatures("0:3,0.7, 1:2") == ((0.0, 3), (0.7, 1), (1.0, 2))


def test_the_invented_share_is_exact(model):
    for share, wanted in ((0.45, 9), (1.0, 20), (0.0, 0)):
        plan = Plan(model, PROMPTS, _config(sequences=20, invent=share))
        assert sum(plan.job(i).invented for i in range(20)) == wanted
    assert Plan(model, [], _config(invent=1.0)).job(3).prompt == -1


def test_long_prompts_are_left_out(model, tmp_path):
    prompts = ["x" * 200, "ab"]
    report = generate_data(model, prompts, tmp_path, _config(sequences=2))
    assert report.left_out == 1
    text = read(tmp_path)
    assert text.prompt is not None and text.prompt.tolist() == [1, 1]
    with pytest.raises(ValueError, match="1 prompts given, none with 1..49 tokens"):
        Plan(model, prompts[:1], _config())
    with pytest.raises(ValueError, match="no prompts given"):
        Plan(model, [], _config())


def test_plain_text_needs_no_template(model, tmp_path):
    config = _config(chat=False, sequences=2)
    generate_data(model, ["abc", "de"], tmp_path, config)
    text = read(tmp_path)
    assert text.tokens[0, :3].tolist() == [97, 98, 99]
    assert text.role[0, :4].tolist() == [FORCED] * 3 + [ANSWER]
    with pytest.raises(ValueError, match="a conversation needs chat=True"):
        Plan(model, PROMPTS, config)


WRONG = {
    "`sequences` is 0": {"sequences": 0},
    "`length` is 1": {"length": 1},
    "`batch` is True": {"batch": True},
    "`shard` is 0": {"shard": 0},
    "`invent` is 1.5": {"invent": 1.5},
    "`answers` is 0": {"answers": 0},
    "`seed` is -1": {"seed": -1},
    "`seed` is None": {"seed": None},
    "`temperatures` is": {"temperatures": ()},
    "weights >= 1": {"temperatures": ((1.0, 0),)},
    "`temperature` is -1.0": {"temperatures": ((-1.0, 1),)},
    "with chat=False": {"invent": 0.1, "chat": False},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_named(message):
    with pytest.raises(ValueError) as error:
        DataConfig(**({"sequences": 1} | WRONG[message]))
    assert message in str(error.value)


def test_the_model_must_fit(model):
    with pytest.raises(ValueError, match="`length` is 600; 'tiny' has 512"):
        Plan(model, PROMPTS, _config(length=600))
    silent = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="has no tokenizer"):
        Plan(silent, PROMPTS, _config())
    for text in ("0:3,warm", "0.7:x", ""):
        with pytest.raises(ValueError, match="`temperatures` is"):
            parse_temperatures(text)


TEMPLATES = {
    "is none of the stop tokens": (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    ),
    "exactly once": (
        "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}<eos>{% endfor %}"
    ),
    "but not the assistant's": (
        "{% for m in messages %}{{ m['content'] }}"
        "{{ '<eos>' if m['role'] == 'user' else '#' }}{% endfor %}"
    ),
    "in another way": (
        "{% for m in messages %}{{ m['content'] }}<eos>"
        "{{ '!' if loop.length == 1 else '?' }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("message", TEMPLATES)
def test_templates_in_which_nothing_can_be_invented(message):
    template = TEMPLATES[message]
    tokenizer = dataclasses.replace(byte_tokenizer(), chat_template=template)
    with pytest.raises(ValueError, match=message):
        invented_turns(tokenizer, (EOS_ID,))


def test_turns_of_a_template():
    tokenizer = byte_tokenizer()
    turns = invented_turns(tokenizer, (7, EOS_ID))
    parts = (turns.opening, turns.answer_header, turns.question_header)
    text = [tokenizer.decode(ids) for ids in parts]
    assert text == ["user: ", "assistant: ", "user: "]
    assert turns.close == EOS_ID


def test_the_settings_file_is_whole(model, tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        generate_data(model, PROMPTS, tmp_path, _config())
    assert list(tmp_path.iterdir()) == []


def test_the_logger_tells_of_shards_and_of_prompts_left_out(model, tmp_path, caplog):
    caplog.set_level("INFO", "dspark_jax.training")
    generate_data(model, ["x" * 200, "ab"], tmp_path, _config(sequences=7))
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "1 of 2 prompts have more than 49 tokens and are left out"
    assert lines[1].startswith("part-00000.npz: 6 of 7 sequences, ")
    assert lines[2].startswith("part-00001.npz: 7 of 7 sequences, ")
