"""The HTTP server: routes, limits, metrics, hot swap and workers around an `Engine`. Imports no torch."""
