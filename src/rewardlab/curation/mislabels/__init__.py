"""Search for pairs that are probably labelled the wrong way round, and for what removing them is worth."""
