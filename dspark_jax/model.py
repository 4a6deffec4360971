"""A loaded model: configs, weights, tokenizer, and its compiled programs."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from dspark_jax.checkpoint import known, native
from dspark_jax.checkpoint.draft import read_draft
from dspark_jax.checkpoint.load import (
    ShardingFor,
    check_pair,
    fit_draft,
    has_own_draft,
    read_config,
    read_params,
)
from dspark_jax.checkpoint.vocabulary import check_vocabulary
from dspark_jax.config import DTYPES
from dspark_jax.config_draft import DraftConfig, TargetConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.decoding.programs import Programs
from dspark_jax.errors import CheckpointError
from dspark_jax.models import family
from dspark_jax.models.params import Tree, flatten, is_stacked, unflatten
from dspark_jax.processes import put
from dspark_jax.spec import Spec, placement, share_tables
from dspark_jax.text import Tokenizer, load_tokenizer
from pallas_kernels import Implementation, require_implementation

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """What `load` returns and `generate` takes.

    Attributes:
      spec: the static half; hashable.
      params: `{"target": ..., "draft": ...}`, plain nested dicts of arrays.
      tokenizer: None for a checkpoint without one; then only `generate_tokens`
        works.
      name: what `load` was asked for.
      programs: the compile table, shared by all calls.
    """

    spec: Spec
    params: Tree = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None = dataclasses.field(repr=False)
    name: str
    programs: Programs = dataclasses.field(repr=False)

    def info(self) -> dict[str, Any]:
        """Sizes and settings, JSON-ready."""
        leaves = {k: flatten(v).values() for k, v in self.params.items()}
        target, draft = self.spec.target, self.spec.draft
        known = self.programs.equivalence
        return {
            "name": self.name,
            "architecture": target.architecture,
            "layers": target.num_layers,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "dtype": target.dtype,
            "gamma": self.spec.gamma,
            "draft_layers": draft.backbone.num_layers if draft else 0,
            "parameters": {k: sum(x.size for x in v) for k, v in leaves.items()},
            "bytes": {k: sum(x.nbytes for x in v) for k, v in leaves.items()},
            "programs": self.programs.count,
            "equivalence": None if known is None else known.to_json(),
        }


def make_model(
    spec: Spec, params: Tree, tokenizer: Tokenizer | None = None, name: str = "custom"
) -> Model:
    """A model from configs and weights of one's own.

    Args:
      spec: `Spec(target_config, draft_config)`.
      params: plain nested dicts that match it, layers stacked or listed. Listed
        layers are computed one by one, which is faster on CPU.
      tokenizer: for `generate`; None serves `generate_tokens` only.
      name: shown in `info`.

    Raises:
      ValueError: parameters that do not match the spec.
    """
    if spec.draft is not None and "draft" in params and "target" in params:
        draft = params["draft"]
        if "lm_head" not in draft:
            draft = share_tables(spec.draft, draft, params["target"])
        params = {**params, "draft": draft}
    spec.check_params(params)
    stacked = is_stacked(params["target"])
    return Model(spec, params, tokenizer, name, Programs(spec, stacked))


def load(
    target: str | Path,
    draft: str | Path | None = "auto",
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    weights: Literal["float", "int8"] = "float",
    implementation: Implementation | None = None,
    one_by_one: bool = False,
    cache_dir: str | Path | None = None,
) -> Model:
    """Loads a target and its draft.

    Args:
      target: a known name ("smollm2-135m"), a published folder, a `.gguf` file,
        a converted directory, or `org/name` on the hub.
      draft: likewise; "auto" takes the draft shipped for a known name, or the one in
        the target's own files (DeepSeek-V4), and otherwise none; None decodes plainly.
      mesh: devices with axes "data" and "tensor"; every weight is placed in
        shards as its declaration says. None: the default device.
      dtype: of the weights; None keeps what is stored, 8-bit and 4-bit floats of
        DeepSeek-V4 included, which a name expands.
      weights: "int8" rounds the matrices of target and draft to 8-bit integers with
        a scale an output, which a CPU multiplies faster; another model by a little,
        for plain and speculative decoding alike. CPU only.
      implementation: of sampling and verification: "reference", "pallas" (GPU
        kernels, jax >= 0.11.2), or None, which takes the kernels where they can
        run. All give the same tokens.
      one_by_one: verify drafts row by row, ending at the first one that falls; the same
        text, a step of the target for every token.
      cache_dir: where known models are converted to, once.

    Raises:
      CheckpointError: files that cannot be read or do not fit each other.
      ValueError: bad arguments.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.load("smollm2-135m")  # doctest: +SKIP
      >>> model.spec.gamma  # doctest: +SKIP
      5
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}; allowed: None, {', '.join(DTYPES)}")
    _check_mesh(mesh)
    on_cpu = jax.default_backend() == "cpu" and mesh is None
    _check_weights(weights, on_cpu)
    require_implementation(implementation)
    path = known.resolve(target, cache_dir=cache_dir)
    draft_path = _find_draft(str(target), path, draft, cache_dir)
    kind, config = read_config(path)
    if kind != "target" or isinstance(config, DraftConfig):
        raise CheckpointError(f"{path} is a {kind}; `target` needs a target model")
    tokenizer = _tokenizer(path)
    if tokenizer is not None:
        config = check_vocabulary(config, tokenizer.size)
        if not config.eos_ids and tokenizer.eos_ids:
            config = dataclasses.replace(config, eos_ids=tokenizer.eos_ids)
    asked, dtype = dtype, dtype or config.dtype
    config = dataclasses.replace(config, dtype=dtype)
    if isinstance(config, V4Config) and asked is not None:
        config = dataclasses.replace(config, weights="float")
    place = placement(Spec(config, mesh=mesh), "target") if mesh else None
    _, _, target_params = read_params(path, dtype=asked, sharding_for=place)
    params: Tree = {"target": target_params}
    draft_config: DraftConfig | None = None
    if draft_path is not None:
        draft_config, draft_params = _read_draft(draft_path, config, asked, mesh)
        params["draft"] = share_tables(draft_config, draft_params, target_params)
    if on_cpu:
        whole = weights == "int8"
        params["target"] = family.target_of(config).for_cpu(
            config, params["target"], whole
        )
        if draft_config is not None:
            params["draft"] = family.draft_of(draft_config).for_cpu(
                draft_config, params["draft"], whole
            )
    cache_dtype = "float32" if on_cpu else dtype
    spec = Spec(config, draft_config, mesh, cache_dtype, implementation, one_by_one)
    return make_model(spec, params, tokenizer, str(target))


def _check_weights(weights: str, on_cpu: bool) -> None:
    if weights not in ("float", "int8"):
        raise ValueError(f"`weights` is {weights!r}; allowed: 'float', 'int8'")
    if weights == "int8" and not on_cpu:
        raise ValueError(
            "`weights` is 'int8' with a mesh or an accelerator; integers are for one "
            "CPU, use 'float' here"
        )


def _check_mesh(mesh: Mesh | None) -> None:
    if mesh is None:
        return
    unknown = set(mesh.axis_names) - {"data", "tensor"}
    if unknown:
        raise ValueError(
            f"`mesh` has axes {mesh.axis_names}; allowed: 'data' and 'tensor'"
        )
    explicit = [t for t in mesh.axis_types if t != jax.sharding.AxisType.Auto]
    if explicit:
        raise ValueError(
            f"`mesh` has axis types {mesh.axis_types}; make it with "
            "axis_types=(jax.sharding.AxisType.Auto,) * n"
        )


def _find_draft(
    target: str, path: Path, draft: str | Path | None, cache_dir: str | Path | None
) -> Path | None:
    if draft is None:
        return None
    if str(draft) != "auto":
        return known.resolve(draft, cache_dir=cache_dir)
    if has_own_draft(path):
        return path
    name = f"{target}-dspark"
    package = Path(__file__).parent
    # Beside the package in a checkout, inside it when installed from a wheel.
    for folder in (package.parent / "checkpoints" / name, package / "drafts" / name):
        if target in known.KNOWN and native.is_native(folder):
            return folder
    return None


def _tokenizer(path: Path) -> Tokenizer | None:
    if path.is_file():
        from dspark_jax.checkpoint.gguf_source import gguf_metadata
        from dspark_jax.text import tokenizer_from_gguf

        return tokenizer_from_gguf(gguf_metadata(path))
    try:
        return load_tokenizer(path)
    except CheckpointError as error:
        logger.info("no tokenizer: %s", error)
        return None


def _read_draft(
    path: Path, target: TargetConfig, dtype: str | None, mesh: Mesh | None
) -> tuple[DraftConfig, Tree]:
    own = isinstance(target, V4Config)
    as_read = None if mesh is None else _draft_place(path, target, dtype, mesh)
    config, params = read_draft(
        path, dtype=dtype if own else target.dtype, sharding_for=as_read
    )
    config, params = fit_draft(target, config, params)
    backbone = dataclasses.replace(config.backbone, dtype=target.dtype)
    config = dataclasses.replace(config, backbone=backbone)
    # What is declared in a type of its own stays in it.
    declared = flatten(family.draft_of(config).abstract_draft_params(config))
    cast = {leaf: x.astype(declared[leaf].dtype) for leaf, x in flatten(params).items()}
    if mesh is not None:
        place = placement(Spec(target, config, mesh), "draft")
        cast = {leaf: put(x, place(leaf)) for leaf, x in cast.items()}
    return config, unflatten(cast)


def _draft_place(
    path: Path, target: TargetConfig, dtype: str | None, mesh: Mesh
) -> ShardingFor | None:
    """Where leaves go as they are read; None for a draft that is changed first."""
    if native.is_native(path):
        return None
    _, config = read_config(path, "draft")
    if not isinstance(config, DraftConfig):
        return None
    if config.backbone.vocab_size != target.vocab_size:
        return None
    config = check_pair(target, config)
    backbone = config.backbone
    if isinstance(backbone, V4Config) and dtype is not None:
        backbone = dataclasses.replace(backbone, weights="float")
    config = dataclasses.replace(config, backbone=backbone)
    return placement(Spec(target, config, mesh), "draft")
