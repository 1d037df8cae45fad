"""Which processes there shall be, and that they are there."""
