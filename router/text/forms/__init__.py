"""How models write calls of functions: forms as data, and what reads and forces any of them."""
