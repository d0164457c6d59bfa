"""The commands. Each parses its arguments first and imports the rest afterwards, so that `--help` is fast."""
