"""All stages from one file."""
