"""Laws that every right attention obeys, each tried on code by running it."""
