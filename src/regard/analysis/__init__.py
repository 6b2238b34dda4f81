"""Analyses of recordings: kinds of heads, shares of text segments, eviction scores."""
