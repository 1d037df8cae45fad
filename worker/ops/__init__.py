"""What layers and steps compute: each op's definition in plain torch and, beside it, its kernel."""
