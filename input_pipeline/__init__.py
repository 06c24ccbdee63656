"""Data sets as rows with random access, and the global batch as a function of the step.

Read in this order: source (what a row is), row_source (which data set), rows (rows as an index over
the store), store (documents as tokens on disk), shard_writer, tfds and text/ (what fills it),
batches (the rows of a step).
"""
