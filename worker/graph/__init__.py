"""How a step's device work is launched: op by op ("eager"), or replayed from CUDA graphs."""
