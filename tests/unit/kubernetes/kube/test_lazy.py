from __future__ import annotations

import subprocess
import sys

import stoker.engine.kubernetes.api as kube


def test_the_http_library_is_loaded_with_the_first_client_and_not_before() -> None:
    code = (
        "import sys; from stoker.engine.kubernetes.api import KubeConfig, KubeError, kinds;"
        "assert not {'aiohttp', 'yaml'} & set(sys.modules), 'loaded too early';"
        "from stoker.engine.kubernetes.api import Kube; assert 'aiohttp' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists() -> None:
    assert [name for name in kube.__all__ if not hasattr(kube, name)] == []
