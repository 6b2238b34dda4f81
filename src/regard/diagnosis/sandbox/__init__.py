"""Checks of user code in a separate process."""
