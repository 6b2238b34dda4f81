"""Indices of the leading axes of a matrix of shape (2, 6, rows, columns)."""

LEADING = {
    "batch": lambda m: m[1],
    "batch-and-head": lambda m: m[1, 4],
    "negative": lambda m: m[-1, -2],
    "slice-of-heads": lambda m: m[:, 3:6],
    "cut-group": lambda m: m[:, 1:5],
    "step-over-heads": lambda m: m[:, ::2],
    "head-of-all": lambda m: m[:, 2],
    "batch-kept": lambda m: m[1:2, 0:3],
    "ellipsis": lambda m: m[0, ...],
    "twice": lambda m: m[0][3],
    "whole": lambda m: m[...],
    "full-slices": lambda m: m[:, :, :, :],
}
