"""Speculation: what proposes the drafts that verify windows check."""
