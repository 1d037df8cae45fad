"""Faults under load: see __main__."""
