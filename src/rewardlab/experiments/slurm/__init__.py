"""Studies on a Slurm cluster: batch scripts, their submission, and what Slurm says about the jobs."""
