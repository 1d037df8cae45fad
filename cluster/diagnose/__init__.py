"""What `serve` refuses or warns of, and what `doctor` tells."""
