"""What config.json says of a model: architectures, sizes, refusals. Free of torch."""
