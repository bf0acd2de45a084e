"""The tables of docs/foreign-files.md, generated from the rows, so that they always agree with the code."""

from __future__ import annotations

from stoker.spec.interop.rows import BY_SCOPE, SCOPES, Does

HEADING = "## What becomes of each key"
_ORDER = (Does.HONOURED, Does.HARMLESS, Does.SAID, Does.IGNORED, Does.REFUSED)


def tables_markdown() -> str:
    """Everything from the heading on. Ends with a newline."""
    parts = [
        HEADING,
        "",
        "*honoured*: done as written. *harmless*: it makes no difference. *said*: done in another way, and you are "
        "told. *ignored*: refused without `--lenient`. *refused*: also with it, unless the cluster's admin allows it.",
        "",
    ]
    for scope, title in SCOPES.items():
        rows = sorted(BY_SCOPE[scope].values(), key=lambda row: _ORDER.index(row.does))
        parts += [f"### {title}", "", "| key | what becomes of it | |", "|---|---|---|"]
        parts += [f"| `{row.key}` | {row.does} | {_cell(row.words)} |" for row in rows]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
