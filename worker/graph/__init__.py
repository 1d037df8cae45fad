"""How a step's device work is launched: op by op, or replayed from CUDA graphs."""
