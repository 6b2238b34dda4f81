"""What somebody's attention computes, read from the numbers of its own runs."""
