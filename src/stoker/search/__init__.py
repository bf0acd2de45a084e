"""Hyperparameter search: pure state machines. No files yet."""
