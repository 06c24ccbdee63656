"""Checks of an installation, for the verb `doctor`: each returns findings, and changes nothing."""
