"""Errors that the library raises beside plain `ValueError`."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read as asked: what is wrong with which file."""


class CacheFull(RuntimeError):
    """A request needs more cache positions than there are."""
