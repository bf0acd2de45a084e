"""inotify, as the launcher knows it. It lives one layer down because the local engine watches the same files."""

from __future__ import annotations

from stoker.task.inotify import *  # noqa: F403
