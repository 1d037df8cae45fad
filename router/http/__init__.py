"""The HTTP server: connections, routes, answers and who may ask."""
