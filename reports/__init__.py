"""Presentation: tables, drawings and pages. Nothing is computed here that is not printed."""
