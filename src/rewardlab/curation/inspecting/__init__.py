"""Inspection of a dataset: numbers with intervals, and rendered rows."""
