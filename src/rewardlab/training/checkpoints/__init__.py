"""What a run keeps on disk: checkpoints to resume exactly, and reward-model folders."""
