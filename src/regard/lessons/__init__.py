"""Eight lessons, from averages to a transformer that learns: text with code that runs.

The lessons are in docs/lessons of the repository; ``text`` is a link to them, and a wheel has copies.
"""
