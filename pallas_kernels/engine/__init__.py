"""The reference engine's draws, for those who want to reproduce them.

Nothing else in this library imports this package, and no default uses it. It states
what the reference serving engine does between two rows of log-probabilities and a
token: Philox streams indexed by position, weights cut to units of 2^-31, and a float32
acceptance rule with a penalised residual. All words, weights and points are 32-bit
integers and the same on every device; what goes through a float32 `exp` is not.

Two things to know before using it:

* `verify_rows` is near-lossless, see there for the bound; `pallas_kernels.verify_rows`
  is lossless.
* The streams have properties that a sampler should not have, see `streams`.

Positions and seeds are arguments and nothing is stored: arrays in, arrays out.
"""

from pallas_kernels.engine.philox import philox4x32
from pallas_kernels.engine.rule import (
    PENALTY,
    acceptance,
    acceptance_proxy,
    penalised_residual,
    verify_rows,
)
from pallas_kernels.engine.sampling import (
    Drawn,
    Order,
    draw,
    draw_point,
    first_point,
    fixed_weights,
    locate_by_lane,
)
from pallas_kernels.engine.streams import (
    ACCEPT,
    FRESH,
    REPLACEMENT,
    decode_position,
    draft_position,
    draft_seed,
    sequence_number,
    stream_block,
    stream_words,
    uniform,
)

__all__ = [
    "ACCEPT",
    "FRESH",
    "PENALTY",
    "REPLACEMENT",
    "Drawn",
    "Order",
    "acceptance",
    "acceptance_proxy",
    "decode_position",
    "draft_position",
    "draft_seed",
    "draw",
    "draw_point",
    "first_point",
    "fixed_weights",
    "locate_by_lane",
    "penalised_residual",
    "philox4x32",
    "sequence_number",
    "stream_block",
    "stream_words",
    "uniform",
    "verify_rows",
]
