"""A saved reward model at work: served over HTTP, scoring files, proven, imported, exported."""
