"""Configs: `base.py` holds every key; a strategy file names mesh sizes only."""
