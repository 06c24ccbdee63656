"""Optimizers of this project's own."""
