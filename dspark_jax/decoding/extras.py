"""What a call may ask for beside tokens; static, part of a round program's key."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Extras:
    """Nothing is asked for by default, and then nothing is computed or fetched.

    Attributes:
      logprobs: log-probabilities of the emitted tokens.
      trace: confidences and overlaps of the verified drafts.
    """

    logprobs: bool = False
    trace: bool = False


NOTHING = Extras()
