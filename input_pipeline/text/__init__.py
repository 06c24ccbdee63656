"""Text files as rows of tokens: documents are tokenized once, and rows are an index over them.

Read in this order: documents (what a file holds), tokenizer, store (tokens on disk), preparation
(who fills it), packing (which documents share a row), rows (the Source that training reads).

Worker processes import this package: nothing in it imports JAX or TensorFlow Datasets at the top.
"""
