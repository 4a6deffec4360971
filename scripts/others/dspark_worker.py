"""dspark_jax, plain and with its draft; also what the others need of the model."""

import importlib.metadata
from pathlib import Path

from protocol import Unavailable, limit_threads, serve

NAME = "smollm2-135m"


class Dspark:
    """Answers `prompts`, `export`, `setup` and `run`."""

    def prompts(self, count, threads):
        """Held-out prompts by domain with their token ids, and the model's file."""
        limit_threads(threads)
        import dspark_jax
        from dspark_jax.checkpoint.known import KNOWN, packaged_file
        from dspark_jax.evaluation.prompts import held_out
        from dspark_jax.text import render_chat

        self.file = packaged_file(KNOWN[NAME])
        self.model = dspark_jax.load(NAME)
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        groups = held_out(count)
        # Domains take turns.
        turns = []
        for row in range(count):
            for domain, texts in groups.items():
                chat = render_chat(tokenizer, texts[row])
                ids = tokenizer.encode(chat, special=False)
                turns.append({"domain": domain, "text": texts[row], "ids": ids})
        return {
            "prompts": turns,
            "stop_ids": list(self.model.spec.target.eos_ids),
            "file": str(self.file),
        }

    def export(self, folder, ids):
        """Writes the weights under their published names, and logits to check by.

        The file's query and key rows are interleaved for each head; what is
        written has the published order.

        Args:
          folder: gets `config.json`, `model.safetensors` and `check.safetensors`.
          ids: a prompt; its logits float32[T, vocabulary] go with it.
        """
        import jax.numpy as jnp
        import numpy as np
        from safetensors.numpy import save_file

        from dspark_jax.checkpoint.load import read_params
        from dspark_jax.checkpoint.names import HF, declared_shapes, expected
        from dspark_jax.config import DecoderConfig
        from dspark_jax.models.params import flatten

        _, config, params = read_params(self.file)
        assert isinstance(config, DecoderConfig)
        leaves = {k: np.asarray(v) for k, v in flatten(params).items()}
        tensors = {}
        for name, slot in expected(config, declared_shapes(config), HF).items():
            leaf = leaves[slot.path]
            value = leaf if slot.index is None else leaf[slot.index]
            name = name if name.startswith("lm_head") else f"model.{name}"
            tensors[name] = np.ascontiguousarray(value)
        save_file(tensors, Path(folder, "model.safetensors"))
        rows = jnp.asarray([ids], jnp.int32)
        check = {"ids": np.asarray(rows), "logits": _logits(config, params, rows)}
        save_file(check, Path(folder, "check.safetensors"))
        return {"config": _published(config)}

    def setup(self, draft_length, max_new_tokens, prompts):
        """Compiles and runs every program that the prompts need."""
        from dspark_jax.evaluation.compare import Settings, warm_up

        self.lengths = {"plain": 0, "draft": draft_length}
        texts = [prompt["text"] for prompt in prompts]
        warm_up(self.model, texts, Settings(draft_length, max_new_tokens))
        versions = [f"{p} {importlib.metadata.version(p)}" for p in ("jax", "jaxlib")]
        import dspark_jax

        return {
            "version": f"{dspark_jax.__version__} ({', '.join(versions)})",
            "weights": self.model.spec.target.dtype,
            "ways": {"plain": "plain", "draft": f"its draft, {draft_length} tokens"},
        }

    def run(self, way, prompt, max_new_tokens):
        """Decodes one prompt greedily."""
        import dspark_jax

        out = dspark_jax.generate(
            self.model,
            prompt["text"],
            max_new_tokens=max_new_tokens,
            draft_length=self.lengths[way],
        )
        if out.state.tokens[: len(prompt["ids"])] != prompt["ids"]:
            raise Unavailable("failed: the prompt was read as other tokens")
        if out.stats.compile_seconds:
            raise Unavailable("failed: a program was compiled in a timed run")
        # Its own count begins when the prefill's token is there, before the first
        # round is launched.
        speed = out.stats.tokens_per_second
        seconds = (len(out.tokens) - 1) / speed if speed else 0.0
        return {"tokens": out.tokens, "first": 1, "seconds": seconds}


def _logits(config, params, ids):
    """float32[T, vocabulary] of a prompt int32[1, T]."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dspark_jax.models import dense
    from dspark_jax.models.kv_cache import empty_cache
    from dspark_jax.models.rows import dense_rows

    length = ids.shape[1]

    @jax.jit
    def evaluate(params, ids):
        cache = empty_cache(config, 1, length, jnp.dtype("float32"), True)
        start = jnp.zeros((1,), jnp.int32)
        rows = dense_rows(ids, start + length, start)
        logits, _, _ = dense.evaluate(config, params, cache, length, rows, (0,))
        return logits

    logits = np.asarray(evaluate(params, ids), np.float32)
    return logits.reshape(length, -1)


def _published(config):
    """Settings as `transformers` names them; a plain Llama is all that is needed."""
    full = config.full
    plain = full.rope.kind == "default" and not config.attention_bias
    if config.architecture != "llama" or not plain or config.mlp_bias:
        raise Unavailable("failed: not a Llama with plain rotary embedding")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": full.num_kv_heads,
        "head_dim": full.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": full.rope.theta},
    }


if __name__ == "__main__":
    serve(Dspark())
