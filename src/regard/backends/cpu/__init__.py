"""Reductions in compiled passes over tiles of scores, on the CPU."""
