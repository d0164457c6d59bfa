"""Judges score rows, never a model: metrics, intervals, calibration. Imports neither torch nor transformers."""
