"""Training data: from the rows of a source to packed batches, resumed at any place."""
