"""Data sets as rows with random access, and the global batch as a function of the step.

Read in this order: source (what a row is), row_source (which data set), rows (rows as an index over
the store), store (documents as tokens on disk), tfds_documents and text/ (who fills it), batches
(the rows of a step).
"""
