"""How far a draft's confidence was from what its drafts were worth."""

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_axis import fold


def confidence_error(
    accept_prob: jax.Array, confidence: jax.Array, n_drafts: jax.Array
) -> jax.Array:
    """Sum of |chance of acceptance - confidence| over judged drafts.

    Drafts behind a rejection count as well: the chance is one under the drafted
    prefix, whether that was kept or not. Summed in one order, so that the sum does not
    depend on the compiler.

    Args:
      accept_prob: float32[B, T]. `VerifiedRows.accept_prob`, row j of draft j.
      confidence: float32[B, T - 1]. In [0, 1].
      n_drafts: int32[B]. Judged drafts; 0 leaves a request out, as must be done for
        requests that had no proposal.

    Returns:
      float32[]. Divided by the number of judged drafts it is the mean error.
    """
    width = confidence.shape[1]
    if width == 0:
        return jnp.zeros((), jnp.float32)
    step = jnp.arange(width, dtype=jnp.int32)[None, :]
    judged = step < n_drafts[:, None]
    error = jnp.abs(accept_prob[:, :width] - confidence)
    return fold(jnp.where(judged, error, 0.0).reshape(1, -1))[0]
