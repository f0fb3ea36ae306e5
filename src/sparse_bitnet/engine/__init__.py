"""The CPU engine: packed weights, caches and logits behind one Python class."""
