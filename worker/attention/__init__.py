"""Attention over the paged KV cache, one backend per file."""
