"""Computes the steps of a run: loss, update and schedule, and which model is the best so far."""
