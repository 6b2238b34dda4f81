"""Lessons from averages to a transformer that learns and writes: text with code that runs.

Their pages are in ``docs/lessons`` of the repository, and in ``text`` of a wheel.
"""
