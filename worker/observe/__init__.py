"""What is seen of a worker: metrics, spans, times of steps."""
