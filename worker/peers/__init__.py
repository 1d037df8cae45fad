"""Collectives, and memory that the ranks of a host share."""
