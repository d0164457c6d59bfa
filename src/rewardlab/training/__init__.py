"""Trains reward models: the loop, checkpoints, monitoring, cost and settings."""
