"""Shows single rows of a dataset as the model reads them."""
