"""`regard.observe`: record the attention that a model runs."""
