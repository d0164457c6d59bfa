"""Nouns, errors, files and the reward spec. Imports neither torch nor transformers."""
