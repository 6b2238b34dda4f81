"""The `regard` command: one module for each subcommand."""
