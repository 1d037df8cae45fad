"""Collectives of one tensor-parallel worker, one implementation per file."""
