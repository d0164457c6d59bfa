"""What a run keeps: to resume exactly, and as reward-model folders."""
