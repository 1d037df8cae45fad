"""Other people's load generators, run against our server to judge it and our own harness."""
