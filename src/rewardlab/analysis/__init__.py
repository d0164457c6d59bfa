"""Evaluates score rows: intervals, metrics, calibration. Imports neither torch nor transformers."""
