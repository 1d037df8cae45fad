"""Weights: how matrices are stored, and how files fill them."""
