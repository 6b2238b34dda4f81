"""Eight lessons, from averages to a transformer that learns: text with code that runs.

Their texts are in docs/lessons of the repository: ``text`` is a link, of which a wheel has a copy.
"""
