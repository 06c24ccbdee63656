"""This process: its devices, its files, the versions of what it runs, exit codes, extensions."""
