"""Clients of other versions than ours, run in a virtual environment of their own."""
