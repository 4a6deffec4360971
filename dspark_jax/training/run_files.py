"""Files of a training run: settings, metrics, the latest state."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dspark_jax.files import replace_text
from dspark_jax.training.settings import TrainConfig

STATE = re.compile(r"state-(\d+)")


class RunFiles:
    """A folder with these files.

    settings.json   what the run is, to refuse a resumption as another one
    metrics.jsonl   one line a report, in the order of steps
    state-N/        arrays after N steps
    features/       what the target says about the text
    """

    def __init__(self, folder: str | Path):
        """Makes the folder if needed."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def features(self) -> Path:
        """Folder of the feature store."""
        return self.folder / "features"

    def check(self, config: TrainConfig, facts: dict[str, Any]) -> None:
        """Writes the settings, or compares them with those of the run.

        Raises:
          ValueError: the run was made with other settings, target or text.
        """
        path = self.folder / "settings.json"
        wanted = {"config": config.to_json(), **facts}
        if path.exists() and self.latest() is not None:
            found = json.loads(path.read_text(encoding="utf-8"))
            other = sorted(_differences(found, json.loads(json.dumps(wanted))))
            if other:
                raise ValueError(
                    f"{self.folder} holds a run with another {', '.join(other)}; give "
                    "the same settings, target and text, or another folder"
                )
        replace_text(path, json.dumps(wanted, indent=2) + "\n")

    def latest(self) -> Path | None:
        """The newest complete state, or None."""
        found = [
            (int(match[1]), path)
            for path in self.folder.iterdir()
            if (match := STATE.fullmatch(path.name))
        ]
        return max(found)[1] if found else None

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Lets `write` make the state of `step`, then removes earlier ones."""
        path = self.folder / f"state-{step}"
        if path.exists():
            return
        part = self.folder / f"partial-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        try:
            write(part)
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for old in list(self.folder.iterdir()):
            if (match := STATE.fullmatch(old.name)) and int(match[1]) < step:
                shutil.rmtree(old)

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line of metrics."""
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """All lines; a torn last one is left out."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return

    def forget_after(self, step: int) -> None:
        """Drops metrics of steps that are done again after an interruption."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        replace_text(self.folder / "metrics.jsonl", text)


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*found, *wanted}):
        have, want = found.get(name), wanted.get(name)
        if name == "config" and isinstance(have, dict) and isinstance(want, dict):
            names = {field.name for field in dataclasses.fields(TrainConfig)}
            for field in sorted(names - {"steps"}):
                if have.get(field) != want.get(field):
                    yield field
        elif have != want:
            yield name
