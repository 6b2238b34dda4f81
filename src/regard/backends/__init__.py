"""Backends: ways to compute the answers of reductions."""
