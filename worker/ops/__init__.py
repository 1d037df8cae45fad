"""Ops of layers and steps: an op's definition in plain torch and, beside it, its kernel."""
