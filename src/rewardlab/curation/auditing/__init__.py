"""The audit of a dataset: named checks with exact counts, and a cleaned file with a trace."""
