"""The processes of one run: rendezvous, consistency checks, barriers, watchdog, shutdown."""
