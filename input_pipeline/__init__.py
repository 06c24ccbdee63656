"""Data sets as rows with random access, and the global batch as a function of the step.

Read in this order: source (what a row is), row_source (which data set), batches (the rows of
a step), prepare (how a data set becomes rows), sources/builtin (data sets that need no download).
"""
