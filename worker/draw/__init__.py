"""From hidden states to drawn tokens."""
