"""Use of a saved reward model: checking, exporting and scoring files."""
