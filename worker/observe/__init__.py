"""Views of a worker: metrics, spans, times of steps."""
