"""transformers on torch: plain, prompt lookup, and early exit of the same model."""

import importlib
import time
from pathlib import Path

from protocol import Unavailable, limit_threads, serve
from summary import until_stop

# Of the largest logit. Both compute in bfloat16 with other orders of summation;
# a wrong order of query rows or a wrong rotation is off by far more.
TOLERANCE = 0.05
WARM_TOKENS = 16


class Timed:
    """A streamer: when tokens came. The prompt comes first and is not counted."""

    def __init__(self):
        self.deliveries = []

    def put(self, value):
        self.deliveries.append((time.perf_counter(), value.reshape(-1).tolist()))

    def end(self):
        pass


class Transformers:
    """Answers `setup` and `run`."""

    def setup(self, folder, config, threads, dtype, settings, prompts):
        """Loads and checks the model, and chooses the faster dtype on `auto`."""
        limit_threads(threads)
        try:
            self.torch = importlib.import_module("torch")
            self.transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise Unavailable(f"not installed ({error})") from error
        self.torch.set_num_threads(threads)
        self.transformers.logging.set_verbosity_error()
        self.settings = settings
        names = ("bfloat16", "float32") if dtype == "auto" else (dtype,)
        models = {name: self._load(Path(folder), config, name) for name in names}
        errors = {name: self._check(Path(folder), models[name]) for name in names}
        speeds = {}
        for name in (*names, *reversed(names)):  # The first round only warms up.
            self.model = models[name]
            out = self.run("plain", prompts[0], WARM_TOKENS)
            speeds[name] = (len(out["tokens"]) - 1) / out["seconds"]
        chosen = max(names, key=lambda name: speeds[name])
        self.model = models[chosen]
        ways = {
            "plain": "plain",
            "lookup": f"prompt lookup, {settings['lookup_length']} tokens",
            "early_exit": f"early exit after {settings['early_exit']} layers, "
            f"{settings['draft_length']} tokens",
        }
        refused = {}
        for way in ways:
            try:
                for prompt in prompts[:2]:
                    self.run(way, prompt, WARM_TOKENS)
            except Exception as error:
                refused[way] = f"failed: {type(error).__name__}: {error}"
        versions = f"{self.transformers.__version__} (torch {self.torch.__version__})"
        return {
            "version": versions,
            "weights": chosen,
            "ways": ways,
            "refused": refused,
            "warm_up_tokens_per_second": speeds,
            "logits_error": errors,
        }

    def run(self, way, prompt, max_new_tokens):
        """Decodes one prompt greedily; times are those of a streamer."""
        stop_ids, torch = self.settings["stop_ids"], self.torch
        extra = {
            "plain": {},
            "lookup": {"prompt_lookup_num_tokens": self.settings["lookup_length"]},
            "early_exit": {"assistant_early_exit": self.settings["early_exit"]},
        }[way]
        streamer = Timed()
        ids = torch.tensor([prompt["ids"]])
        # A new one each time: assisted generation writes into it.
        options = self.transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
            **extra,
        )
        layers = self.model.config.num_hidden_layers
        try:
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=options,
                    streamer=streamer,
                )
        finally:
            # Early exit lowers it while it drafts, and leaves it so when it fails.
            self.model.config.num_hidden_layers = layers
        _, *new = streamer.deliveries
        tokens = [token for _, some in new for token in some]
        return {
            "tokens": until_stop(tokens, stop_ids, max_new_tokens),
            "first": len(new[0][1]),
            "seconds": new[-1][0] - new[0][0],
        }

    def _load(self, folder, config, dtype):
        from safetensors.torch import load_file

        settings = self.transformers.LlamaConfig(
            **config, bos_token_id=None, eos_token_id=self.settings["stop_ids"]
        )
        model = self.transformers.LlamaForCausalLM(settings)
        left = model.load_state_dict(load_file(folder / "model.safetensors"), False)
        missing = [name for name in left.missing_keys if name != "lm_head.weight"]
        if missing or left.unexpected_keys:
            raise Unavailable(f"failed: weights do not fit: {left}")
        model.tie_weights()
        # Early exit drafts as the model's own settings say, not as a call's do.
        model.generation_config.num_assistant_tokens = self.settings["draft_length"]
        model.generation_config.num_assistant_tokens_schedule = "constant"
        return model.to(getattr(self.torch, dtype)).eval()

    def _check(self, folder, model):
        """Largest difference to dspark_jax's logits, over the largest logit."""
        from safetensors.torch import load_file

        check = load_file(folder / "check.safetensors")
        with self.torch.inference_mode():
            logits = model(check["ids"].long()).logits[0].float()
        wanted = check["logits"]
        error = float((logits - wanted).abs().max() / wanted.abs().max())
        if not error <= TOLERANCE:
            raise Unavailable(
                f"failed: logits are off by {error:.3f} of the largest one in "
                f"{model.dtype}; allowed: {TOLERANCE}. Not timed: another model"
            )
        return error


if __name__ == "__main__":
    serve(Transformers())
