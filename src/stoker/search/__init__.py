"""Hyperparameter search. Not written yet."""
