"""What a draft's confidences are worth: calibration and its measures."""

from dspark_jax.scheduling.calibration import Fit as Fit
from dspark_jax.scheduling.calibration import calibrated as calibrated
from dspark_jax.scheduling.calibration import default_grid as default_grid
from dspark_jax.scheduling.calibration import fit_sts as fit_sts
from dspark_jax.scheduling.calibration import prefix_labels as prefix_labels
from dspark_jax.scheduling.calibration import survival as survival
from dspark_jax.scheduling.calibration_metrics import Metrics as Metrics
from dspark_jax.scheduling.calibration_metrics import metrics as metrics
from dspark_jax.scheduling.calibration_metrics import summary as summary
from dspark_jax.scheduling.online_calibration import OnlineSettings as OnlineSettings
from dspark_jax.scheduling.online_calibration import OnlineState as OnlineState
from dspark_jax.scheduling.online_calibration import fit_online as fit_online
from dspark_jax.scheduling.online_calibration import observe as observe
from dspark_jax.scheduling.online_calibration import overlap_labels as overlap_labels
from dspark_jax.scheduling.online_calibration import refit as refit
from dspark_jax.scheduling.online_calibration import start_online as start_online
from dspark_jax.scheduling.reliability import Reliability as Reliability
from dspark_jax.scheduling.reliability import auroc as auroc
from dspark_jax.scheduling.reliability import brier as brier
from dspark_jax.scheduling.reliability import calibration_noise as calibration_noise
from dspark_jax.scheduling.reliability import (
    expected_calibration_error as expected_calibration_error,
)
from dspark_jax.scheduling.reliability import reliability as reliability
from dspark_jax.scheduling.rounds import KnownRounds as KnownRounds
from dspark_jax.scheduling.rounds import gather_rounds as gather_rounds
