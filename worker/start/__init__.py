"""Building an engine: model, memory, graphs, checks."""
