"""Data sets as rows with random access, and the global batch as a function of the step.

Read in this order: sources (what a row is), batches (which rows a step holds), preparation (how
a data set becomes rows), embedded (the data sets that every machine already has).
"""
