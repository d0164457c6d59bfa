"""What a study came to: all numbers in `summary`, and the same as text, page, Markdown, CSV and JSON."""
