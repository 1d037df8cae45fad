"""The pages of the router in a real browser. Not collected by pytest: it takes minutes."""
