"""Runs worth repeating: model, data and mesh are fixed."""
