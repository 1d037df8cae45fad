"""Launching a step and waiting for it: op by op, or replayed CUDA graphs."""
