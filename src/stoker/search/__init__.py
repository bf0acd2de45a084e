"""Hyperparameter search: pure state machines. The sweep issue fills this room."""
