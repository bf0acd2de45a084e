"""Shared by tests: rigs, boxes, fake servers, players of recorded traces."""
