"""One engine: model, pool and graphs put together, and the launch of its steps."""
