"""Attention over paged KV, and what stores KV."""
