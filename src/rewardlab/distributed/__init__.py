"""Many processes as one run: what they agree on, and how a model is divided among them."""
