"""Text and tokens: tokenizer, template, parsers of answers and grammars."""
