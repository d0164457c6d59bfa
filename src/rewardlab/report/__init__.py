"""Turns estimates into tables. Imports neither torch nor transformers."""
