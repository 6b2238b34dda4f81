"""`regard.check`: find the mistake in attention code, its line, and the fix."""
