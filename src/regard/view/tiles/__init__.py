"""The numbers that the page asks for: maps at every scale, rows, steps."""
