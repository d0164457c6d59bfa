"""Who watches a run, and what is recorded of it."""
