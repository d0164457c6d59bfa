"""Writing datasets as new files: converted, split by conversation, or mixed."""
