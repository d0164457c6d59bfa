"""Prepares: raw preference data to packed batches."""
