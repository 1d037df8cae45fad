"""Moving KV from another worker's memory into our own: one protocol, one file per transport."""
