"""Real models: loading, tokenizing, and trials on synthetic text."""
