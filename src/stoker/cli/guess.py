"""Guesses the name that a misspelt word means."""

from __future__ import annotations

from collections.abc import Sequence


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """The most similar choice, if any is similar at all."""
    import difflib  # lazy: only for mistakes

    begins = [choice for choice in choices if word and choice.startswith(word)]
    if len(begins) == 1:
        return begins[0]
    found = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return found[0] if found else None
