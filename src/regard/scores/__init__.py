"""Sources of attention scores: query and key, given scores, position biases."""
