"""The model: turns packed batches into one reward for each reply."""
