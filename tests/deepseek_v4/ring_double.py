"""The published engine's decode state: a ring of one window, accumulators that shift.

Every row is written when it is evaluated, accepted or not. Rows are evaluated by this
library's model from a state that says the same thing.

    ring            position p in slot p % W
    ratio r         row p % r of r accumulated rows
    ratio 4         row 4 + p % 4 of eight; at each fourth position rows 4.. become 0..
"""

import copy

import jax.numpy as jnp
import numpy as np

from tests.deepseek_v4.goldens import Runner


class RingDouble:
    """One request, one row at a time, in the published form."""

    def __init__(self):
        self._runner = Runner()
        self._window = self._runner.config.window
        self.state = self._runner.host_state()
        self.length = 0
        for layer, ratio in self._compressed():
            for name in self._parts(layer):
                part = self.state[layer][name]
                for rows in ("values", "scores"):
                    size = 8 if ratio == 4 else ratio
                    part[rows] = np.zeros((size, part[rows].shape[1]), np.float32)
                part["entries"] = part["entries"].copy()
            self.state[layer] = dict(self.state[layer])

    def feed(self, ids):
        """Logits of each token; everything is written."""
        return np.concatenate([self._one(token) for token in ids])

    def back_to(self, length):
        """Only the length moves."""
        self.length = length

    def snapshot(self):
        return copy.deepcopy(self.state)

    def restore(self, snapshot, window=True):
        """Puts a snapshot back; without `window`, all but the rings."""
        rings = {layer: own["window"] for layer, own in self.state.items()}
        self.state = copy.deepcopy(snapshot)
        if not window:
            for layer, ring in rings.items():
                self.state[layer]["window"] = ring

    def _compressed(self):
        ratios = enumerate(self._runner.config.compress_ratios)
        return [(str(layer), ratio) for layer, ratio in ratios if ratio]

    def _parts(self, layer):
        return [name for name in ("entries", "index") if name in self.state[layer]]

    def _one(self, token):
        p, runner = self.length, self._runner
        runner.state, runner.length = self._as_committed(), p
        logits, _ = runner.feed([token], 6)
        after = runner.host_state()
        for layer, own in self.state.items():
            own["window"] = own["window"].copy()
            own["window"][p % self._window] = after[layer]["window"][p % self._window]
        for layer, ratio in self._compressed():
            for name in self._parts(layer):
                self._accumulate(self.state[layer][name], after[layer][name], ratio, p)
        self.length += 1
        return logits

    def _accumulate(self, own, after, ratio, p):
        size = len(own["values"])
        row = 4 + p % 4 if ratio == 4 else p % ratio
        for rows in ("values", "scores"):
            own[rows][row] = after[rows][p % size]
        if (p + 1) % ratio:
            return
        own["entries"][p // ratio] = after["entries"][p // ratio]
        if ratio == 4:
            for rows in ("values", "scores"):
                own[rows][:4] = own[rows][4:]

    def _as_committed(self):
        """The library's state that holds what this one does."""
        state = copy.deepcopy(self.state)
        first = self.length // 4 * 4
        for layer, ratio in self._compressed():
            for name in self._parts(layer) if ratio == 4 else ():
                for rows in ("values", "scores"):
                    found = state[layer][name][rows]
                    ring = np.zeros_like(found)
                    for i in range(4):
                        ring[(first - 4 + i) % 8] = found[i]
                        ring[(first + i) % 8] = found[4 + i]
                    state[layer][name][rows] = ring
        return {
            layer: {
                name: (
                    {k: jnp.asarray(v)[None] for k, v in part.items()}
                    if isinstance(part, dict)
                    else jnp.asarray(part)[None]
                )
                for name, part in own.items()
            }
            for layer, own in state.items()
        }
