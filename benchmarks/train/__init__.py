"""Makes the bundled model `tiny`: text, tokenizer and weights (`python -m benchmarks.train`)."""
