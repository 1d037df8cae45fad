"""A load harness for OpenAI-compatible servers: `python -m benchmarks.load --help`."""
