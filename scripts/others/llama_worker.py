"""llama.cpp through llama-cpp-python: the GGUF file itself, plain and prompt lookup."""

import importlib
import time

from protocol import Unavailable, limit_threads, serve
from summary import until_stop

CONTEXT = 1024
WARM_TOKENS = 8


class LlamaCpp:
    """Answers `setup` and `run`."""

    def setup(self, file, threads, settings, prompts):
        """Loads the file twice, with and without the drafts."""
        limit_threads(threads)
        try:
            library = importlib.import_module("llama_cpp")
            speculative = importlib.import_module("llama_cpp.llama_speculative")
        except ImportError as error:
            raise Unavailable(f"not installed ({error})") from error
        self.settings = settings
        length = settings["lookup_length"]
        drafts = {
            "plain": None,
            "lookup": speculative.LlamaPromptLookupDecoding(num_pred_tokens=length),
        }
        self.models = {
            way: library.Llama(
                model_path=file,
                n_ctx=CONTEXT,
                n_threads=threads,
                n_threads_batch=threads,
                draft_model=draft,
                verbose=False,
            )
            for way, draft in drafts.items()
        }
        for way in self.models:
            for prompt in prompts[:2]:
                self.run(way, prompt, WARM_TOKENS)
        return {
            "version": library.__version__,
            "weights": "Q4_1, the file itself",
            "ways": {"plain": "plain", "lookup": f"prompt lookup, {length} tokens"},
        }

    def run(self, way, prompt, max_new_tokens):
        """Decodes one prompt greedily; a token is timed when the generator has it."""
        model, stop_ids = self.models[way], self.settings["stop_ids"]
        if len(prompt["ids"]) + max_new_tokens > CONTEXT:
            raise Unavailable(f"failed: a prompt does not fit in {CONTEXT} tokens")
        # It would otherwise reuse the cache of a prompt with the same beginning.
        model.reset()
        tokens, times = [], []
        for token in model.generate(prompt["ids"], temp=0.0, repeat_penalty=1.0):
            times.append(time.perf_counter())
            tokens.append(int(token))
            if tokens[-1] in stop_ids or len(tokens) == max_new_tokens:
                break
        return {
            "tokens": until_stop(tokens, stop_ids, max_new_tokens),
            "first": 1,
            "seconds": times[-1] - times[0],
        }


if __name__ == "__main__":
    serve(LlamaCpp())
