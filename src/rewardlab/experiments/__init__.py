"""Experiments: plans that are frozen before their runs, run here or on Slurm, and judged."""
