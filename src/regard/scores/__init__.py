"""Where attention scores come from: query and key, given numbers, position biases."""
