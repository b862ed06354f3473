"""The optimizers that a user constructs."""
