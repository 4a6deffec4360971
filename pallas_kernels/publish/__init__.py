"""Publication: from verdicts on rows to the tokens a request emits."""

from pallas_kernels.publish.api import Published, publish

__all__ = ["Published", "publish"]
