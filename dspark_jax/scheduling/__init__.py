"""What a draft's confidences are worth, and how many drafts to verify for it."""

from dspark_jax.scheduling.calibration import Fit as Fit
from dspark_jax.scheduling.calibration import calibrated as calibrated
from dspark_jax.scheduling.calibration import default_grid as default_grid
from dspark_jax.scheduling.calibration import fit_sts as fit_sts
from dspark_jax.scheduling.calibration import prefix_labels as prefix_labels
from dspark_jax.scheduling.calibration import survival as survival
from dspark_jax.scheduling.calibration_metrics import Metrics as Metrics
from dspark_jax.scheduling.calibration_metrics import metrics as metrics
from dspark_jax.scheduling.calibration_metrics import summary as summary
from dspark_jax.scheduling.gate import GateConfig as GateConfig
from dspark_jax.scheduling.gate import GateState as GateState
from dspark_jax.scheduling.gate import gate_decide as gate_decide
from dspark_jax.scheduling.gate import gate_decide_causal as gate_decide_causal
from dspark_jax.scheduling.gate import gate_mean_rate as gate_mean_rate
from dspark_jax.scheduling.gate import gate_rates as gate_rates
from dspark_jax.scheduling.gate import gate_speed as gate_speed
from dspark_jax.scheduling.gate import gate_start as gate_start
from dspark_jax.scheduling.gate import gate_update as gate_update
from dspark_jax.scheduling.gate import margin_gate as margin_gate
from dspark_jax.scheduling.gate import threshold_lengths as threshold_lengths
from dspark_jax.scheduling.gate_costs import GateCosts as GateCosts
from dspark_jax.scheduling.gate_costs import fit_verification as fit_verification
from dspark_jax.scheduling.gate_costs import linear_costs as linear_costs
from dspark_jax.scheduling.gate_costs import measured_costs as measured_costs
from dspark_jax.scheduling.online_calibration import OnlineSettings as OnlineSettings
from dspark_jax.scheduling.online_calibration import OnlineState as OnlineState
from dspark_jax.scheduling.online_calibration import fit_online as fit_online
from dspark_jax.scheduling.online_calibration import observe as observe
from dspark_jax.scheduling.online_calibration import overlap_labels as overlap_labels
from dspark_jax.scheduling.online_calibration import refit as refit
from dspark_jax.scheduling.online_calibration import start_online as start_online
from dspark_jax.scheduling.platt import default_shifts as default_shifts
from dspark_jax.scheduling.platt import fit_platt as fit_platt
from dspark_jax.scheduling.reliability import Reliability as Reliability
from dspark_jax.scheduling.reliability import auroc as auroc
from dspark_jax.scheduling.reliability import brier as brier
from dspark_jax.scheduling.reliability import calibration_noise as calibration_noise
from dspark_jax.scheduling.reliability import (
    expected_calibration_error as expected_calibration_error,
)
from dspark_jax.scheduling.reliability import reliability as reliability
from dspark_jax.scheduling.reprobe import is_probe as is_probe
from dspark_jax.scheduling.reprobe import probe_period as probe_period
from dspark_jax.scheduling.rounds import KnownRounds as KnownRounds
from dspark_jax.scheduling.rounds import gather_rounds as gather_rounds
