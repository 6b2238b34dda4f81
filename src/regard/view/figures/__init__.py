"""Figures for papers, drawn by matplotlib."""
