"""Layers of experts: which tokens go to which, and their products."""
