"""The reward model as a folder: saving, loading and checking it."""
