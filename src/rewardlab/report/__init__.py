"""Formats estimates as tables and reports. Imports neither torch nor transformers."""
