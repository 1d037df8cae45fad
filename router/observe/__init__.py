"""What a router counts, and the form in which it says so."""
