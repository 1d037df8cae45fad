"""One op per file: plain-torch reference, device kernel where there is one, and the public name."""
