"""The page in a notebook cell."""
