"""Preferences from gold scores: pairs or whole rows, divided by prompt, in our form and in TRL's."""
