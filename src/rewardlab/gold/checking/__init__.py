"""The files of all stages against each other, and rows of them as text."""
