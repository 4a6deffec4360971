"""Lossless speculative decoding with DSpark drafts, in JAX."""

from dspark_jax import testing as testing
from dspark_jax.calibrate import Calibration as Calibration
from dspark_jax.calibrate import calibrate as calibrate
from dspark_jax.checkpoint.convert import convert as convert
from dspark_jax.config import AttentionConfig as AttentionConfig
from dspark_jax.config import DecoderConfig as DecoderConfig
from dspark_jax.config import RopeConfig as RopeConfig
from dspark_jax.config_draft import DraftConfig as DraftConfig
from dspark_jax.decoding.generate_tokens import TokensOut as TokensOut
from dspark_jax.decoding.generate_tokens import generate_tokens as generate_tokens
from dspark_jax.decoding.matching import Matcher as Matcher
from dspark_jax.decoding.requests import pack_requests as pack_requests
from dspark_jax.errors import CacheFull as CacheFull
from dspark_jax.errors import CheckpointError as CheckpointError
from dspark_jax.evaluation.evaluate import evaluate as evaluate
from dspark_jax.generate import generate as generate
from dspark_jax.generate import stream as stream
from dspark_jax.model import Model as Model
from dspark_jax.model import load as load
from dspark_jax.model import make_model as make_model
from dspark_jax.probe import deterministic_shapes as deterministic_shapes
from dspark_jax.probe import probe as probe
from dspark_jax.profile import profile as profile
from dspark_jax.results import Piece as Piece
from dspark_jax.results import Result as Result
from dspark_jax.results import RoundLog as RoundLog
from dspark_jax.results import Stats as Stats
from dspark_jax.scheduling.cost_model import CostModel as CostModel
from dspark_jax.scheduling.cost_model import CostTable as CostTable
from dspark_jax.scheduling.gate import GateConfig as GateConfig
from dspark_jax.scheduling.policy import Budget as Budget
from dspark_jax.scheduling.policy import EarlyStop as EarlyStop
from dspark_jax.scheduling.policy import Gate as Gate
from dspark_jax.scheduling.policy import Threshold as Threshold
from dspark_jax.settings import Buckets as Buckets
from dspark_jax.settings import Fixed as Fixed
from dspark_jax.settings import SamplingParams as SamplingParams
from dspark_jax.spec import Spec as Spec
from dspark_jax.training.settings import DraftShape as DraftShape
from dspark_jax.training.settings import TrainConfig as TrainConfig
from dspark_jax.training.train import train as train

__version__ = "0.1.0"
