"""Pure schedulers: what to run next, without tensors or sockets."""
