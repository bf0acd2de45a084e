"""docs/job-file.md, generated from the table of keys, so that it always agrees with the code."""

from __future__ import annotations

from stoker.spec.keys import KEYS, KINDS, Key
from stoker.spec.problems import flow
from stoker.spec.support import GIVEN, NOT_YET

_INTRO = """\
# The job file

A job file says what to train, with what, and what to do when something goes wrong. It is YAML 1.2 (`1e-5` is
a number, `yes` and `on` are text) or JSON, usually named `stoker.yaml`; `run` is the only key it needs:

```yaml
run: python train.py --epochs 20
```

A longer one:

```yaml
name: digits
run: python train.py --epochs 20
setup: pip install -r requirements.txt
env: {OMP_NUM_THREADS: 1}
resources: {cpu: 2, memory: 4Gi}
checkpoint: {keep: 3, best: {metric: val_acc, mode: max}}
retries: 2
timeout: 12h
secrets: [HF_TOKEN]
tags: [baseline]
```

`stoker submit stoker.yaml` starts it. `--set KEY=VALUE` changes one value for one submit
(`--set resources.gpu=1 --set tags=[a,b]`; `--set timeout=null` removes a key), and most keys have a flag on
`stoker run`. Mistakes are all reported at once, each with its line and the fix. `stoker schema` prints a JSON
Schema for editors.

**Sizes** are bytes or `500Mi`, `8Gi` (powers of 1024) or `2GB` (powers of 1000). **Durations** are seconds or
`90s`, `1h30m`, `2d`. **Cores** are `2`, `0.5` or `500m`. Variables, tags and names are kept as they are written:
`VERSION: 1.10` is the text 1.10.

A key marked *not yet* is checked like any other and then refused by name on that engine. No key is silently
ignored.

## Keys

| key | type | default | meaning | example | flag | local engine |
|---|---|---|---|---|---|---|
"""


def reference_markdown() -> str:
    """The whole page. Ends with a newline."""
    return _INTRO + "".join(f"| {' | '.join(_row(key))} |\n" for key in KEYS)


def _row(key: Key) -> list[str]:
    words = ", ".join(f"`{choice}`" for choice in key.choices) or KINDS[key.kind].words
    default = f"`{flow(key.default)}`" if key.default is not None else key.note or "none"
    path = key.path.replace("*", "NAME")
    flag = f"`{key.flag}`" if key.flag else "the words after `--`" if key.path == "run" else "`--set`"
    cells = [f"`{path}`", words, default, key.meaning, f"`{flow(key.example)}`", flag, _local(key)]
    return [cell.replace("|", "\\|") for cell in cells]


def _local(key: Key) -> str:
    for row in NOT_YET["local"]:
        if key.path == row.key or key.path.startswith(f"{row.key}."):
            return f"{row.what} not yet" if row.what else "not yet"
    return GIVEN.get(key.path, "yes")
