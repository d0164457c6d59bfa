"""Scoring of the rows of a file: in parts that survive a kill, and written in the format of the output."""
