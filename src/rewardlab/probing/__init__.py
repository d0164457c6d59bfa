"""Fits a reward head on a frozen model, without fine-tuning."""
