"""Other APIs than chats, turned into chats and back: Anthropic's messages, OpenAI's responses."""
