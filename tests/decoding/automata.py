"""Grammars as automata over tokens, their matchers, and the laws they leave."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Automaton:
    """`steps[state][token]` is the next state; a token without one is refused.

    Attributes:
      steps: by state; state 0 is the first one.
      vocab: V.
      ends: tokens after which nothing is asked any more.
    """

    steps: Mapping[int, Mapping[int, int]]
    vocab: int
    ends: tuple[int, ...] = ()

    def allowed(self, state):
        mask = np.zeros(self.vocab, bool)
        mask[list(self.steps[state])] = True
        return mask

    def accepts(self, tokens):
        state = 0
        for token in tokens:
            if token not in self.steps[state]:
                return False
            state = self.steps[state][token]
        return True


class Counting:
    """A matcher of an automaton that writes down what it is asked."""

    def __init__(self, automaton, as_words=False):
        self.automaton, self.as_words = automaton, as_words
        self.states, self.tokens = [0], []
        self.calls = []

    @property
    def finished(self):
        return bool(self.tokens) and self.tokens[-1] in self.automaton.ends

    def allowed(self):
        assert not self.finished, "asked for a mask behind the end"
        self.calls.append(("allowed", len(self.tokens)))
        mask = self.automaton.allowed(self.states[-1])
        if not self.as_words:
            return mask
        words = np.zeros(-(-len(mask) // 32), np.uint32)
        for token in np.flatnonzero(mask).tolist():
            words[token // 32] |= np.uint32(1 << token % 32)
        # What lies behind the vocabulary must not matter.
        words[-1] |= np.uint32(2**32 - 2 ** ((len(mask) - 1) % 32 + 1))
        return words

    def advance(self, token):
        self.calls.append(("advance", token))
        after = self.automaton.steps[self.states[-1]]
        if token not in after:
            return False
        self.states.append(after[token])
        self.tokens.append(token)
        return True

    def rollback(self, count):
        assert 0 < count <= len(self.tokens)
        assert not self.finished, "taken back behind the end"
        self.calls.append(("rollback", count))
        del self.states[-count:], self.tokens[-count:]


def masked_row(row, allowed):
    """A law, its excluded tokens left out."""
    kept = np.where(allowed, row, 0.0)
    return kept / kept.sum()


def masked_chain(target, automaton, length, first=1):
    """Law of all texts of `length` tokens after token `first`, as {tokens: mass}."""
    law = {((), 0): 1.0}
    for _ in range(length):
        law = {
            ((*tokens, token), after): mass * row[token]
            for (tokens, state), mass in law.items()
            for row in [_next(target, automaton, tokens, state, first)]
            for token, after in automaton.steps[state].items()
            if row[token] > 0
        }
    return {tokens: mass for (tokens, _), mass in law.items()}


def _next(target, automaton, tokens, state, first):
    last = tokens[-1] if tokens else first
    return masked_row(target[last], automaton.allowed(state))


def distance(law, target, automaton, first=1):
    """Largest error of a law of texts of several lengths.

    A text stands for all that the masked target may say after it, so that the mass of
    each longest text is compared by prefixes. Refused texts are errors.
    """
    length = max(map(len, law))
    wanted = masked_chain(target, automaton, length, first)
    found = dict.fromkeys(wanted, 0.0)
    worst = 0.0
    for tokens, mass in law.items():
        if not automaton.accepts(tokens):
            worst = max(worst, mass)
            continue
        tails = {t: m for t, m in wanted.items() if t[: len(tokens)] == tokens}
        whole = sum(tails.values())
        if not whole:
            worst = max(worst, mass)
            continue
        for tail, share in tails.items():
            found[tail] += mass * share / whole
    return max(worst, max(abs(found[t] - m) for t, m in wanted.items()))
