"""Watches a run and records it."""
