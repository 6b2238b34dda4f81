"""How answers are computed; nothing here knows what is done with them."""
