"""The page over HTTP, on this machine alone."""
