"""Requests on their way to workers and back."""
