from __future__ import annotations

import subprocess
import sys


def test_the_http_library_is_loaded_with_the_client_and_not_before() -> None:
    code = (
        "import sys; from stoker.engine.kubernetes.api import errors, kinds, kubeconfig;"
        "assert not {'aiohttp', 'yaml'} & set(sys.modules), 'loaded too early';"
        "from stoker.engine.kubernetes.api import client; assert 'aiohttp' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
