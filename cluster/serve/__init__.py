"""The command `serve`: its processes, its Ray, its lines."""
