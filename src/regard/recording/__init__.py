"""Recordings: the attention of each layer that ran, in memory and in files."""
