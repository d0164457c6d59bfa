"""What a run can be told, and where defaults come from. Needs no torch."""
