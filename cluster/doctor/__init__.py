"""`kvlane doctor`: what is wrong with a machine or what runs, why it matters, what to do."""
