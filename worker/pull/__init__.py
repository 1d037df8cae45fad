"""The pull protocol, decode's and prefill's side."""
