"""Pictures, with matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dspark_jax.files import staged


def figure_class() -> Any:
    """matplotlib's `Figure`: no display, no global state.

    Raises:
      ValueError: matplotlib is missing.
    """
    try:
        importlib.import_module("matplotlib")
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise ValueError(
            "plots need matplotlib; run: pip install 'dspark-jax[plot]'"
        ) from None


def save_figure(figure: Any, path: str | Path, dpi: int = 110) -> None:
    """Writes a picture, whole or not at all; the ending of `path` says in what form.

    The same figure gives the same bytes, and text in an .svg stays text.
    """
    settings: Any = importlib.import_module("matplotlib")
    dateless = {"Date": None} if Path(path).suffix == ".svg" else None
    plain = {"svg.fonttype": "none", "svg.hashsalt": "dspark"}
    with settings.rc_context(plain), staged(path) as partial:
        figure.savefig(partial, metadata=dateless, dpi=dpi)
