"""Text files as documents in the store, tokenizers, and conversations.

Read in this order: files (which there are), documents (what a file holds), tokenizer, worker (a
unit of the files as a shard), preparation (all of them).

Worker processes import this package: nothing in it imports JAX or TensorFlow Datasets at the top.
"""
