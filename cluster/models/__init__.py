"""Target models and where their weights come from."""
