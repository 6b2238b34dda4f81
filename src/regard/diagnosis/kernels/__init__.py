"""Fused functions of query, key and value, judged in the dtype and on the device that they need."""
