"""Text files of a user's own: reading, tokenizing, storing and packing documents."""
