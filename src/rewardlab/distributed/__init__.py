"""Joins the processes of one run: what the ranks agree on, and how a model is divided among them."""
