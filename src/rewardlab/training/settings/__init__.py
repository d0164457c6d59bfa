"""The settings of a run, and where their defaults come from. Needs no torch."""
