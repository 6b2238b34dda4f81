"""Tokens, spans of text, and their display."""
