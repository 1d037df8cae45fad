"""KV memory: page accounting, prefix tree, byte layout and the tensors themselves."""
