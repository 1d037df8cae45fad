"""One inference worker: the engine, its KV cache and its transports."""
