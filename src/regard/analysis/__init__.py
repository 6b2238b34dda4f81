"""What recordings show: kinds of heads, shares of text segments, eviction scores."""
