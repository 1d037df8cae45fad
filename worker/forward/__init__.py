"""What one forward pass runs on: its batch and its context."""
