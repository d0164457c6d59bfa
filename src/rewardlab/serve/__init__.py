"""A reward artifact checked and put to work."""
