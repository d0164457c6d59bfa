"""Measures what a step costs: tokens, FLOPs, time and memory."""
