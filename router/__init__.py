"""The HTTP front: OpenAI API, text, dispatch. Never imports torch."""
