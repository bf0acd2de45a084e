from __future__ import annotations

import asyncio
import threading

from stoker.control.notifier import Notifier


def test_a_waiter_wakes_on_publish_from_another_thread() -> None:
    hub = Notifier()

    async def wait() -> int:
        timer = threading.Timer(0.05, hub.publish, ["r"])
        timer.start()
        return await hub.changed("r", 0, timeout=30)

    assert asyncio.run(wait()) == 1


def test_a_change_before_the_wait_is_not_missed() -> None:
    hub = Notifier()
    hub.publish("r")
    assert asyncio.run(hub.changed("r", 0, timeout=30)) == 1


def test_a_wait_ends_after_its_timeout_and_is_removed() -> None:
    hub = Notifier()
    assert asyncio.run(hub.changed("r", 0, timeout=0.01)) == 0
    assert hub._waiters == {}
