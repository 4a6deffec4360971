"""Which mesh axis a layer's heads and experts are split over, if any."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Parallel:
    """Static: the axis that layers run on by hand, or None on one device.

    Inside `jax.shard_map` every device holds some heads, groups and experts and
    computes a part of a sum; `total` adds the parts. Whatever is decided from the sum
    (selected entries, experts, tokens) is then decided from the same numbers
    everywhere.
    """

    axis: str | None = None

    def total(self, part: jax.Array) -> jax.Array:
        """The sum over devices."""
        return part if self.axis is None else jax.lax.psum(part, self.axis)

    def index(self) -> jax.Array | int:
        """This device's place on the axis."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis)


ALONE = Parallel()
