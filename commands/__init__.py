"""The command line: its flags, the `--config` flag, refusals and exit codes."""
