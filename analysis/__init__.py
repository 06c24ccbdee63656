"""Analysis of compiled programs from their text, and constants of chips."""
