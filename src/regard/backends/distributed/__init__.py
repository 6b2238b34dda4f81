"""Matrices that lie on several processes, as DTensors."""
