"""Things that several tests use."""
