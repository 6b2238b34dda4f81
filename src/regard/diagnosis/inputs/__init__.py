"""Somebody's code as something to run: what it takes, how it is built, copied and called."""
