"""Calibration: measuring a model's static sparsity once, so that inference looks it up."""

from gossamer.calibration.axis import AxisObserver
from gossamer.calibration.fast import FastObserver
from gossamer.calibration.profile import load_profile, merge_thresholds, write_profile
from gossamer.calibration.run import Calibration, Job, Outcome, Progress, calibrate
from gossamer.calibration.setup import Setup, measured_steps
from gossamer.calibration.west import WestObserver

__all__ = [
    "AxisObserver",
    "Calibration",
    "FastObserver",
    "Job",
    "Outcome",
    "Progress",
    "Setup",
    "WestObserver",
    "calibrate",
    "load_profile",
    "measured_steps",
    "merge_thresholds",
    "write_profile",
]
