"""Makes tests/data/tokenizer: a byte-level BPE of a few kilobytes, ChatML template.

python tests/text/make_small_tokenizer.py
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

FOLDER = Path(__file__).parents[1] / "data" / "tokenizer"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(first, second):\n    return first + second\n",
    "One two three, user and assistant, system and answer.",
)
TEMPLATE = """\
{% if messages[0]['role'] != 'system' %}
<|im_start|>system
Answer briefly.{{ eos_token }}
{% endif %}
{% for message in messages %}
    {% if message['role'] not in ['system', 'user', 'assistant'] %}
        {{ raise_exception('Unknown role ' + message['role']) }}
    {% endif %}
{{ '<|im_start|>' + message['role'] }}
{{ message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def main() -> None:
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        min_frequency=2,
        special_tokens=[AddedToken(token, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    FOLDER.mkdir(parents=True, exist_ok=True)
    state = json.loads(backend.to_str())
    state["model"]["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    (FOLDER / "tokenizer.json").write_text(
        json.dumps(state, ensure_ascii=False, separators=(",", ":")) + "\n"
    )
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    generation = {"eos_token_id": [2, 0]}
    (FOLDER / "generation_config.json").write_text(json.dumps(generation) + "\n")


if __name__ == "__main__":
    main()
