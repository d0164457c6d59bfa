"""Control experiments that show what a reward model has really learned."""
