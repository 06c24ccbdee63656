"""The tour: what sharding does, shown by small examples that run. `python main.py tour`."""
