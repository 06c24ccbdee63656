"""Where arrays are placed: mesh, dims, rules, their verdict, constraints and shardings."""
