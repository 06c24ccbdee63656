"""Configs: `base.py` has every key; a strategy file sets only mesh sizes."""
