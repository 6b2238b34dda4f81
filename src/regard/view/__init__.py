"""Views of attention: terminal, figures, notebook, server, and the offline page."""
