"""Questions to an attention matrix, answered one block of complete rows at a time."""
