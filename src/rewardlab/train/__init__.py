"""Changes weights."""
