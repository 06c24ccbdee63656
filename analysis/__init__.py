"""What compiled programs do, read from their text, and constants of the chips that run them."""
