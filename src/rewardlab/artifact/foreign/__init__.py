"""Reward models of other projects: the layout of their folders, their heads, rendering and own scores."""
