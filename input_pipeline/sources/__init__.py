"""Data sets by name: their builders and their catalog."""
