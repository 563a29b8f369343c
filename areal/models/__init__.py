"""Model-side code: attention for packed batches and, later, model families of our own."""
