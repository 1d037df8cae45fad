"""Device-resident step state, and a Plan made into a Batch."""
