"""Recordings and heads in the terminal."""
