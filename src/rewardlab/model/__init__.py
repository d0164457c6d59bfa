"""Computes: packed batches to one reward a reply."""
