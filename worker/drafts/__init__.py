"""What proposes drafts: drafters, their models and the readers of their files."""
