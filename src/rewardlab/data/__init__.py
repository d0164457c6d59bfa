"""Prepares data: from raw preferences to tokens and plans of micro-batches."""
