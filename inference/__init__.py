"""Sampling text from a trained model."""
