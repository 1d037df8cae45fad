"""Recurrent layers: gated delta nets over slots of state."""
