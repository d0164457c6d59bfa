"""Use of a saved reward model: serving it over HTTP, scoring files, verifying, importing and exporting it."""
