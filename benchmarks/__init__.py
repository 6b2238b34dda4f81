"""How fast and how small regard is, measured; ``python -m benchmarks`` runs it."""
