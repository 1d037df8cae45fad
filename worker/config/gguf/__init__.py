"""GGUF files, read as the model directories that everything else knows. Free of torch."""
