"""Surveys of a corpus: statistics of every head on every text, as Parquet files."""
