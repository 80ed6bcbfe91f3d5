"""Measurements in, fitted parameters out."""
