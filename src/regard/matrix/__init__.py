"""The lazy attention matrix and what is derived from it."""
