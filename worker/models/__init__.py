"""Model architectures, one per file, with their configuration and their weights' loading."""
