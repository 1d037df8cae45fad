"""How a forward is launched: eagerly now, replayed from CUDA graphs later."""
