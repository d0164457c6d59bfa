"""How well proxies match the gold model: numbers by prompt and slice, proxies side by side, and verdicts."""
