"""The operations that a model runs, observed without changing them."""
