"""The facts of somebody's attention, read from the numbers of its own runs."""
