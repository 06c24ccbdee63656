"""The processes of one run: who they are, what they agree on, and how they end together."""
