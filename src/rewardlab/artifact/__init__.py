"""The reward model as a folder: save and load."""
