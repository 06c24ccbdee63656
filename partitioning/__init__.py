"""Mesh, dims, rules and their verdict, constraints, layout tables, collectives."""
