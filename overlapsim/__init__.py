"""Predict, plan and run computation/communication overlap on multi-GPU machines."""

__version__ = "0.1.0"
