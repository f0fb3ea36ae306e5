"""The layer, and what turns a model's linear layers into it."""
