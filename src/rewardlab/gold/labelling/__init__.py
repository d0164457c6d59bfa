"""Gold scores for sampled replies."""
