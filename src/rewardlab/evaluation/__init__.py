"""Evaluates reward models on held-out preferences; changes no weight."""
