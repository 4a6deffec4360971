"""Golden ids: tokens that a caller forces on rows, after sampling."""

import jax
import jax.numpy as jnp


def override(
    accept: jax.Array, token: jax.Array, draft_ids: jax.Array, golden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Verdicts in which golden ids stand for what was sampled.

    Where a golden id is given, the row's draft stands if it is that id, and else the
    id replaces it. Such rows are outside every statement about distributions.

    Args:
      accept: bool[B, T]. Verdicts.
      token: int32[B, T]. Tokens of the rows.
      draft_ids: int32[B, T - 1]. Row j judges draft j; the last row has none.
      golden: int32[B, T]. -1 leaves a row as it is.

    Returns:
      (accept, token) for `publish`.

    Raises:
      ValueError: `golden` is not as large as `token`.
    """
    if golden.shape != token.shape:
        raise ValueError(
            f"`golden` has shape {golden.shape}; it must be {token.shape}, like `token`"
        )
    forced = golden >= 0
    drafts = jnp.pad(draft_ids, ((0, 0), (0, 1)), constant_values=-1)
    return (
        jnp.where(forced, golden == drafts, accept),
        jnp.where(forced, golden, token),
    )
