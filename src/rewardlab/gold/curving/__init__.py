"""Over-optimisation curves: what happens to gold as a proxy picks the best of ever more replies."""
