"""Makes the bundled model `tiny` and its drafter (`python -m benchmarks.train`)."""
