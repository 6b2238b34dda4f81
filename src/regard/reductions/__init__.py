"""Reductions: computations over an attention matrix, one block of complete rows at a time."""
