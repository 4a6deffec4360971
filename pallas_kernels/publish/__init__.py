"""Publication: from verdicts on rows to what each request emits."""

from pallas_kernels.publish.api import Published, publish
from pallas_kernels.publish.confidence import confidence_error
from pallas_kernels.publish.golden import override

__all__ = ["Published", "confidence_error", "override", "publish"]
