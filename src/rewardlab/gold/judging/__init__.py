"""Gold labels of a language model that compares two replies at a time, in both orders, behind a chat API."""
