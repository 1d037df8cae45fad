"""What layers and steps compute: an op's definition in plain torch and, beside it, its kernel."""
