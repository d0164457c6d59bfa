"""What the benchmarks share: interleaved timing, processes in lockstep, FLOPs, the machine, dated results."""
