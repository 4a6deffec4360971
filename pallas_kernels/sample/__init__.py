"""Drawing tokens from logits, with the rows they were drawn from."""

from pallas_kernels.sample.api import Sampled, argmax_ids, sample_logits

__all__ = ["Sampled", "argmax_ids", "sample_logits"]
