"""OpenAI's API: bodies of requests and of answers."""
