"""Tools for preference data: inspect, audit, clean, convert, split and mix it."""
