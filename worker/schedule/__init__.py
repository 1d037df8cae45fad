"""Schedulers: what to run next, from host state alone, without tensors or sockets."""
