"""Text of the small model that conforms to a JSON schema, plainly and with drafts.

pip install 'dspark-jax[grammar]'
python scripts/structured_output.py
python scripts/structured_output.py --temperature 0.8 "Describe Rome as JSON."
"""

from __future__ import annotations

import argparse
import json

import dspark_jax as dspark
from dspark_jax.grammar import Grammars

PROMPTS = [
    "Describe Paris as JSON with city, country and population.",
    "Describe Tokyo as JSON with city, country and population.",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args()

    model = dspark.load(args.model)
    grammars = Grammars(model)
    for draft_length in (0, None):
        outs = dspark.generate(
            model,
            args.prompts,
            matchers=[grammars.json_schema(SCHEMA) for _ in args.prompts],
            sampling=dspark.SamplingParams(args.temperature, seed=args.seed),
            draft_length=draft_length,
            max_new_tokens=args.max_new_tokens,
        )
        print("plain" if draft_length == 0 else "with drafts")
        for out in outs:
            # A text that was cut off by the token limit is no JSON.
            value = json.loads(out.text) if out.finish_reason == "stop" else out.text
            print(f"  {value}  ({out.stats.accepted_length:.2f} tokens a round)")


if __name__ == "__main__":
    main()
