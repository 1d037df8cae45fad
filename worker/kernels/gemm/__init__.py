"""Products of linear layers."""
