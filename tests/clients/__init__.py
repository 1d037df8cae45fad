"""Libraries that talk to an OpenAI server, in environments of their own; see README.md."""
