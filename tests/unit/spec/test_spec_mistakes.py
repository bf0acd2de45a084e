"""Common mistakes of new users, and the exact messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.errors import SpecError
from stoker.spec import Job, load_job, parse_job

MISTAKES: list[tuple[str, str, str | None]] = [
    ("nmae: digits\nrun: python train.py\n", "stoker.yaml:1: nmae: no such key", "Did you mean `name`?"),
    (
        "name: My Digits Run!\nrun: python train.py\n",
        'stoker.yaml:1: name: "My Digits Run!" is not a name: lower-case letters, digits and dashes, at most 40',
        "Did you mean `my-digits-run`?",
    ),
    (
        "name: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\nrun: python train.py\n",
        'stoker.yaml:1: name: "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" is not a name: lower-case letters, digits and dashes, at most 40',
        "Did you mean `aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa`?",
    ),
    ("command: python train.py\n", "stoker.yaml:1: command: no such key", "Did you mean `run`?"),
    ("name: digits\n", "stoker.yaml:1: run: is missing", "Add a line like `run: python train.py`."),
    (
        "run:\n",
        "stoker.yaml:1: run: has no value",
        "Write one, as in `run: python train.py --epochs 20`, or remove the line.",
    ),
    (
        "run: {cmd: python}\n",
        "stoker.yaml:1: run: a mapping is not a command",
        "Write it as in `python train.py --epochs 20`.",
    ),
    ("run: []\n", "stoker.yaml:1: run: is an empty list", "Write a command, as in `python train.py`."),
    ("run: ''\n", 'stoker.yaml:1: run: "" is empty', "Write a command, as in `python train.py`."),
    (
        "run: python train.py\nresources: {memory: 8Gib}\n",
        'stoker.yaml:2: resources.memory: "8Gib" is not a size',
        "Did you mean `8GiB`?",
    ),
    (
        "run: python train.py\nresources: {memory: 8}\n",
        "stoker.yaml:2: resources.memory: 8 is 8 bytes, too small to be meant; the least is 1Mi",
        "Did you mean `8Gi`?",
    ),
    (
        "run: python train.py\nresources: {memory: 8 gb}\n",
        'stoker.yaml:2: resources.memory: "8 gb" is not a size',
        "Did you mean `8GB`?",
    ),
    (
        "run: python train.py\nresources: {memory: 500m}\n",
        'stoker.yaml:2: resources.memory: "500m" is not a size',
        "Did you mean `500Mi`?",
    ),
    (
        "run: python train.py\nresources: {memory: -1Gi}\n",
        'stoker.yaml:2: resources.memory: "-1Gi" is not a size',
        "Write a size, as in `8Gi`, `500Mi` or `2GB`.",
    ),
    (
        "run: python train.py\nresources: {memory: 5000Pi}\n",
        'stoker.yaml:2: resources.memory: "5000Pi" is more than 1Ei',
        "Write a size, as in `8Gi` or `500Mi`.",
    ),
    (
        "run: python train.py\nresources: {cpu: -1}\n",
        "stoker.yaml:2: resources.cpu: -1 is too small; the least is 0.001",
        "Leave the key out for no limit.",
    ),
    (
        "run: python train.py\nresources: {cpu: .nan}\n",
        "stoker.yaml:2: resources.cpu: nan is not a number of cores",
        "Write cores, as in `2`, `0.5` or `500m`.",
    ),
    (
        "run: python train.py\nresources: {cpu: two}\n",
        'stoker.yaml:2: resources.cpu: "two" is not a number of cores',
        "Write cores, as in `2`, `0.5` or `500m`.",
    ),
    (
        "run: python train.py\nresources: {cpu: 1e9}\n",
        "stoker.yaml:2: resources.cpu: 1000000000 is more than 100000 cores",
        None,
    ),
    (
        "run: python train.py\nresources: {gpu: 0.5}\n",
        "stoker.yaml:2: resources.gpu: 0.5 is not a whole number of GPUs",
        "Write a whole number of GPUs from 0 to 100000.",
    ),
    (
        "run: python train.py\nresources: {gpu: true}\n",
        "stoker.yaml:2: resources.gpu: true is not a whole number of GPUs",
        "Write a whole number of GPUs from 0 to 100000.",
    ),
    (
        "run: python train.py\nresources: 4\n",
        "stoker.yaml:2: resources: 4 is not a mapping of keys",
        "Write it as in `resources: {cpu: 4, memory: 8Gi, gpu: 1}`.",
    ),
    (
        "run: python train.py\nresources:\n  memroy: 8Gi\n",
        "stoker.yaml:3: resources.memroy: no such key",
        "Did you mean `memory`?",
    ),
    (
        "run: python train.py\ngpus: 2\n",
        "stoker.yaml:2: gpus: no such key",
        "Did you mean `gpu`, under `resources`?",
    ),
    ("run: python train.py\ngpu: 2\n", "stoker.yaml:2: gpu: no such key", "`gpu` belongs under `resources`."),
    (
        "run: python train.py\nmemory: 8Gi\n",
        "stoker.yaml:2: memory: no such key",
        "`memory` belongs under `resources`.",
    ),
    (
        "run: python train.py\nresources:\n",
        "stoker.yaml:2: resources: has no value",
        "Write one, as in `resources: {cpu: 4, memory: 8Gi, gpu: 1}`, or remove the line.",
    ),
    (
        "run: python train.py\ntimeout: 2 hours\n",
        'stoker.yaml:2: timeout: "2 hours" is not a duration',
        "Did you mean `2h`?",
    ),
    (
        "run: python train.py\ntimeout: 12:30:00\n",
        'stoker.yaml:2: timeout: "12:30:00" is not a duration',
        "Did you mean `12h30m`?",
    ),
    (
        "run: python train.py\ntimeout: forever\n",
        'stoker.yaml:2: timeout: "forever" is not a duration',
        "Write a duration, as in `90s`, `1h30m` or `2d`.",
    ),
    (
        "run: python train.py\ntimeout: 0\n",
        "stoker.yaml:2: timeout: 0 is no time at all",
        "Write a duration, as in `90s` or `1h30m`.",
    ),
    (
        "run: python train.py\ntimeout: 100w100w100w100w100w100w\n",
        'stoker.yaml:2: timeout: "100w100w100w100w100w100w" is more than ten years',
        "Leave the key out for no limit.",
    ),
    (
        "run: python train.py\nworkers: 2-8\n",
        'stoker.yaml:2: workers: "2-8" is not a number of workers',
        "Did you mean `2..8`?",
    ),
    (
        "run: python train.py\nworkers: 8..2\n",
        'stoker.yaml:2: workers: "8..2" runs backwards',
        "Did you mean `2..8`?",
    ),
    ("run: python train.py\nworkers: -1\n", "stoker.yaml:2: workers: -1 is not between 0 and 100000", None),
    (
        "run: python train.py\nframework: pytorch\n",
        'stoker.yaml:2: framework: "pytorch" is not one of the choices',
        "Did you mean `torch`? Choices: torch, tensorflow, jax, mpi, horovod, dask, none.",
    ),
    (
        "run: python train.py\nframework: jaxx\n",
        'stoker.yaml:2: framework: "jaxx" is not one of the choices',
        "Did you mean `jax`? Choices: torch, tensorflow, jax, mpi, horovod, dask, none.",
    ),
    (
        "run: python train.py\nframework: spark\n",
        'stoker.yaml:2: framework: "spark" is not one of the choices',
        "Choices: torch, tensorflow, jax, mpi, horovod, dask, none.",
    ),
    (
        "run: python train.py\npriority: hihg\n",
        'stoker.yaml:2: priority: "hihg" is not one of the choices',
        "Did you mean `high`? Choices: low, normal, high, or a number from -1000 to 1000.",
    ),
    (
        "run: python train.py\npriority: 5000\n",
        "stoker.yaml:2: priority: 5000 is not between -1000 and 1000",
        None,
    ),
    ("run: python train.py\nretries: -1\n", "stoker.yaml:2: retries: -1 is not between 0 and 1000", None),
    ("run: python train.py\nretries: 1001\n", "stoker.yaml:2: retries: 1001 is not between 0 and 1000", None),
    (
        "run: python train.py\ntags: baseline, big\n",
        'stoker.yaml:2: tags: "baseline, big" is not a list',
        "Did you mean `tags: [baseline, big]`?",
    ),
    (
        "run: python train.py\ntags: [a b]\n",
        'stoker.yaml:2: tags[0]: "a b" is not a tag: letters, digits and any of ._:/=+- , at most 63',
        "Did you mean `a-b`?",
    ),
    (
        'run: python train.py\ntags: ["\\e[31mred"]\n',
        'stoker.yaml:2: tags[0]: "\\x1b[31mred" is not a tag: letters, digits and any of ._:/=+- , at most 63',
        "Did you mean `31mred`?",
    ),
    (
        "run: python train.py\nenv: [A=1]\n",
        "stoker.yaml:2: env: a list is not a mapping of keys",
        "Write it as in `env: {OMP_NUM_THREADS: 1}`.",
    ),
    (
        "run: python train.py\nenv: {1X: 2}\n",
        'stoker.yaml:2: env.1X: "1X" is not a variable\'s name: letters, digits and underscores',
        "Did you mean `_1X`?",
    ),
    (
        "run: python train.py\nenv: {A: }\n",
        "stoker.yaml:2: env.A: has no value",
        'Write `""` for an empty value.',
    ),
    (
        "run: python train.py\nenv: {A: [1, 2]}\n",
        "stoker.yaml:2: env.A: a list is not text",
        "Write one value, in quotes where in doubt.",
    ),
    (
        "run: python train.py\nenv: {STOKER_RUN: x}\n",
        'stoker.yaml:2: env.STOKER_RUN: "STOKER_RUN" is reserved: Stoker sets variables that start with STOKER_',
        "Choose another name.",
    ),
    (
        "run: python train.py\nsecrets: HF_TOKEN\n",
        "stoker.yaml:2: secrets: this is not a list",
        "Write it as in `secrets: [HF_TOKEN]`.",
    ),
    (
        "run: python train.py\nsecrets: {HF_TOKEN: hf_abc}\n",
        "stoker.yaml:2: secrets: values do not belong in a job file",
        "List names only, as in `[HF_TOKEN]`; values are read at submit.",
    ),
    (
        "run: python train.py\nsecrets: [HF_TOKEN=hf_abc]\n",
        "stoker.yaml:2: secrets[0]: holds a value; values do not belong here",
        "Write `HF_TOKEN`; its value is read at submit.",
    ),
    (
        "run: python train.py\nenv: {HF_TOKEN: x}\nsecrets: [HF_TOKEN]\n",
        'stoker.yaml:3: secrets: "HF_TOKEN" is both a secret and a variable in `env`',
        "Remove it from one of them.",
    ),
    (
        "run: python train.py\ncheckpoint: {best: {metric: val_acc}}\n",
        "stoker.yaml:2: checkpoint.best.mode: is missing",
        "Add it, as in `mode: max`. Choices: max, min.",
    ),
    (
        "run: python train.py\ncheckpoint: {best: {metric: val_acc, mode: maximize}}\n",
        'stoker.yaml:2: checkpoint.best.mode: "maximize" is not one of the choices',
        "Did you mean `max`? Choices: max, min.",
    ),
    (
        "run: python train.py\ncheckpoint: {keep: 0}\n",
        "stoker.yaml:2: checkpoint.keep: 0 is not between 1 and 10000",
        None,
    ),
    (
        "run: python train.py\nexclusive: yes\n",
        'stoker.yaml:2: exclusive: "yes" is text in YAML 1.2',
        "Write `true`.",
    ),
    (
        "run: python train.py\nimage: docker://team/torch:2.9\n",
        'stoker.yaml:2: image: "docker://team/torch:2.9" is not an image reference',
        "Did you mean `team/torch:2.9`?",
    ),
    (
        "run: python train.py\nimage: Team/Torch\n",
        'stoker.yaml:2: image: "Team/Torch" is not an image reference',
        "Did you mean `team/torch`?",
    ),
    (
        "run: python train.py\ninputs: {d: ./data}\n",
        'stoker.yaml:2: inputs.d: "./data" is not an input',
        "Write `data://NAME@VERSION`, `s3://BUCKET/PATH`, `pvc://CLAIM` or `file:///PATH`.",
    ),
    (
        "run: python train.py\ninputs: {d: s4://bucket/x}\n",
        'stoker.yaml:2: inputs.d: "s4://bucket/x" has an unknown scheme',
        "Write `data://NAME@VERSION`, `s3://BUCKET/PATH`, `pvc://CLAIM` or `file:///PATH`.",
    ),
    (
        "run: python train.py\ninputs: {d: 'file://data'}\n",
        'stoker.yaml:2: inputs.d: "file://data" is not a path of this machine',
        "Write it in full and without colons, as in `file:///data/mnist`.",
    ),
    (
        "run: python train.py\ninputs: {a-b: data://x, a_b: data://y}\n",
        'stoker.yaml:2: inputs: "a-b" and "a_b" would both be STOKER_INPUT_A_B',
        "Rename one of them.",
    ),
    (
        "run: python train.py\nroles: {worker: {count: 2}}\n",
        'stoker.yaml:2: roles.worker: "worker" is the role of the job itself',
        "Set `workers`, `run` and `resources` of the job instead.",
    ),
    (
        "run: python train.py\nroles: {ps: {cuont: 2}}\n",
        "stoker.yaml:2: roles.ps.cuont: no such key",
        "Did you mean `count`?",
    ),
    (
        "run: python train.py\nroles: {ps: {resources: {memory: 1q}}}\n",
        'stoker.yaml:2: roles.ps.resources.memory: "1q" is not a size',
        "Write a size, as in `8Gi`, `500Mi` or `2GB`.",
    ),
    (
        "run: python train.py\nidle: {gpu_below: 0.05}\n",
        "stoker.yaml:2: idle.gpu_below: 0.05 could be a share or a percentage",
        "Did you mean `5%`?",
    ),
    (
        "run: python train.py\nidle: {then: pause}\n",
        'stoker.yaml:2: idle.then: "pause" is not one of the choices',
        "Did you mean `suspend`? Choices: suspend, stop.",
    ),
    (
        "run: python train.py\nsetup: {inputs: [a]}\n",
        "stoker.yaml:2: setup.run: is missing",
        "Add it, as in `run: pip install -r requirements.txt`.",
    ),
    (
        "run: python train.py\nsetup: {run: make, inputs: [../x]}\n",
        'stoker.yaml:2: setup.inputs[0]: "../x" leads out of the working directory',
        "Write it relative to `workdir`.",
    ),
    (
        "run: python train.py\nproject: Vision Team\n",
        'stoker.yaml:2: project: "Vision Team" is not a name: lower-case letters, digits and dashes, at most 40',
        "Did you mean `vision-team`?",
    ),
    (
        "run: python train.py\ncluster: GPU_prod\n",
        'stoker.yaml:2: cluster: "GPU_prod" is not a name: lower-case letters, digits, dashes and dots, at most 63',
        "Did you mean `gpu-prod`?",
    ),
    (
        "run: python train.py\ngrace: -5\n",
        "stoker.yaml:2: grace: -5 is negative",
        "Write a duration, as in `90s` or `1h30m`.",
    ),
    (
        "name: digits\nrun: echo a: b\n",
        "stoker.yaml:2:12: a second `:` on this line, inside its value",
        "Put a value that holds `: ` in quotes.",
    ),
    (
        "name: digits\n\trun: x\n",
        "stoker.yaml:2:1: a tab is used where YAML wants spaces",
        "Indent with spaces.",
    ),
    (
        "run: x\nresources:\n\tcpu: 1\n",
        "stoker.yaml:3:1: a tab is used where YAML wants spaces",
        "Indent with spaces.",
    ),
    (
        "run: [python, train.py\nname: x\n",
        "stoker.yaml:2:5: the `[` opened on line 1 is not closed",
        "Close it, or put a comma between its items.",
    ),
    ("run: 'python train.py\n", "stoker.yaml:2:1: the quote opened on line 1 is never closed", "Close it."),
    (
        "run: x\n  name: y\n",
        "stoker.yaml:2:7: this line is indented deeper than the one above, which has a value already",
        "Indent keys of one mapping equally, with spaces.",
    ),
    (
        "run: x\n name: y\n",
        "stoker.yaml:2:6: this line is indented deeper than the one above, which has a value already",
        "Indent keys of one mapping equally, with spaces.",
    ),
    ("run x\nname: y\n", "stoker.yaml:1:1: line 1 has no `:` after its key", "Write it as `key: value`."),
    ("run: x\nname: @x\n", "stoker.yaml:2:7: a value cannot begin with `@`", "Put the value in quotes."),
    (
        "run: x\nsetup: {run: y, inputs: [*.txt]}\n",
        "stoker.yaml:2:27: `*` and `&` begin an alias or an anchor",
        "Put the value in quotes.",
    ),
    (
        "run: x\nname: *x\n",
        "stoker.yaml:2:7: `*x` refers to an anchor that is not there",
        'Put it in quotes if you mean the text: "*x".',
    ),
    (
        "run: {{ command }}\n",
        "stoker.yaml:1:7: a key cannot be a mapping",
        "Put text that begins with `{` or `[` in quotes.",
    ),
    ("run: x\nrun: y\n", 'stoker.yaml:2:1: "run" is given twice, first on line 1', "Remove one of the two."),
    ("run: x\n<<: {a: 1}\n", "stoker.yaml:2:1: `<<` (merge) is not part of YAML 1.2", "Write the keys out."),
    (
        "run: x\n---\nrun: y\n",
        "stoker.yaml:2:1: a second document begins here",
        "Put each job in a file of its own.",
    ),
    (
        "run: !!python/object/apply:os.system [id]\n",
        'stoker.yaml:1:6: the tag "!!python/object/apply:os.system" is not allowed',
        "A job file holds plain values only.",
    ),
    (
        "run: !cmd x\n",
        'stoker.yaml:1:6: the tag "!cmd" is not allowed',
        "A job file holds plain values only.",
    ),
    (
        "- run: x\n",
        "stoker.yaml:1: is a list, not a mapping of keys",
        "Remove the `- ` in front of the keys.",
    ),
    (
        "python train.py\n",
        "stoker.yaml:1: does not look like a job file",
        "Write keys and values, as in `run: python train.py`.",
    ),
    ("# nothing\n", "stoker.yaml: is empty", "Add a line like `run: python train.py`."),
    ("", "stoker.yaml: is empty", "Add a line like `run: python train.py`."),
    (
        "run: a\x07b\n",
        "stoker.yaml:1:7: the character 0x07 is not allowed",
        "Remove it; a job file is plain text.",
    ),
    (
        "name: Digits!\nrun: x\nresources: {cpu: lots, memory: 8Gib}\nretires: 2\n",
        '4 mistakes in stoker.yaml\n  stoker.yaml:1: name: "Digits!" is not a name: lower-case letters, digits and dashes, at most 40\n    hint: Did you mean `digits`?\n  stoker.yaml:3: resources.cpu: "lots" is not a number of cores\n    hint: Write cores, as in `2`, `0.5` or `500m`.\n  stoker.yaml:3: resources.memory: "8Gib" is not a size\n    hint: Did you mean `8GiB`?\n  stoker.yaml:4: retires: no such key\n    hint: Did you mean `retries`?',
        None,
    ),
]


@pytest.mark.parametrize(("text", "message", "hint"), MISTAKES)
def test_message(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(text)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    json.dumps(caught.value.to_json(), allow_nan=False)


def test_details_name_everything() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job("run: x\nresources:\n  memory: 8Gib\nframework: pytorch\n", source="a.yaml")
    details = caught.value.details
    assert {key: details[key] for key in ("file", "line", "key", "value", "choices")} == {
        "file": "a.yaml",
        "line": 3,
        "key": "resources.memory",
        "value": "8Gib",
        "choices": [],
    }
    assert [(e["line"], e["key"]) for e in details["errors"]] == [(3, "resources.memory"), (4, "framework")]
    assert details["errors"][1]["choices"] == ["torch", "tensorflow", "jax", "mpi", "horovod", "dask", "none"]


def test_very_many_mistakes_stay_readable() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job("run: x\ntags: [" + ",".join(['"!"'] * 500) + "]\n")
    assert caught.value.message.startswith("500 mistakes in stoker.yaml\n")
    assert caught.value.message.endswith("and 480 more")
    assert len(caught.value.details["errors"]) == 100


@pytest.mark.parametrize(
    "text",
    [
        "run: x\nsecrets: {HF_TOKEN: hf_hidden}\n",
        "run: x\nsecrets: [HF_TOKEN=hf_hidden]\n",
        "run: x\nsecrets: [[hf_hidden]]\n",
        "run: x\nsecrets: [hf-hidden]\n",
        "run: x\nsecrets: hf_hidden\n",
        "run: x\nsecrets: {a: {b: hf_hidden}}\n",
    ],
)
def test_values_of_secrets_are_never_quoted_back(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(text)
    assert "hidden" not in json.dumps(caught.value.to_json())
    with pytest.raises(SpecError) as caught:
        parse_job("run: x\n", overrides=["secrets=[A=hf_hidden]"])
    assert "hidden" not in json.dumps(caught.value.to_json())


def test_control_characters_do_not_reach_the_terminal() -> None:
    with pytest.raises(SpecError) as caught:
        parse_job('run: x\n"k\\e[31m": 1\nname: "\\e[2J\\u202e"\n')
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)


FILES = [
    ("missing.yaml", "no such file"),
    ("", "is a directory"),
    ("empty.yaml", "is empty"),
    ("binary.yaml", "is not a text file"),
    ("latin.yaml", "is not UTF-8 text"),
    ("utf16.yaml", "is UTF-16 text"),
    ("list.yaml", "is a list, not a mapping of keys"),
    ("big.yaml", "is larger than 1 MiB"),
    ("train.py", "is a script, not a job file"),
    ("nul\0.yaml", "cannot be read"),
]


@pytest.mark.parametrize(("name", "message"), FILES)
def test_file_that_is_no_job_file(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty.yaml").write_text("\n\n")
    (tmp_path / "binary.yaml").write_bytes(b"\x7fELF\0\0\xff\xfe")
    (tmp_path / "latin.yaml").write_bytes("run: x\nname: caf\xe9\n".encode("latin-1"))
    (tmp_path / "utf16.yaml").write_text("run: x\n", encoding="utf-16")
    (tmp_path / "list.yaml").write_text("- run: x\n")
    (tmp_path / "big.yaml").write_text("# " + "x" * (1 << 20))
    (tmp_path / "train.py").write_text("print(1)\n")
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / name if name else tmp_path)
    assert message in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint or "nul" in name


def test_nearest_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "stoker.yml").write_text("run: x\n")
    with pytest.raises(SpecError, match="no such file") as caught:
        load_job(tmp_path / "stoker.yaml")
    assert caught.value.hint == f"Did you mean `{tmp_path / 'stoker.yml'}`?"
    (tmp_path / "stoker.yaml").write_text("run: x\n")
    with pytest.raises(SpecError, match="is a directory") as caught:
        load_job(tmp_path)
    assert caught.value.hint == f"Did you mean `{tmp_path / 'stoker.yaml'}`?"


def test_endless_file_is_read_no_further_than_the_limit() -> None:
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        load_job("/dev/zero")


def test_json_that_is_no_job() -> None:
    for raw in (None, [], "run", 5, {"run": "x", "nope": 1}, {"run": "x", "timeout": float("inf")}):
        with pytest.raises(SpecError) as caught:
            Job.from_json(raw)
        json.dumps(caught.value.to_json(), allow_nan=False)
    deep: dict[str, object] = {}
    for _ in range(900):
        deep = {"a": deep}
    with pytest.raises(SpecError, match="nested more than 50 deep"):
        Job.from_json({"run": "x", "env": deep})


def test_more_processes_than_a_task_can_have() -> None:
    """Reported with its place, and only for new jobs: a stored job was accepted before."""
    with pytest.raises(SpecError) as caught:
        parse_job("run: python train.py\nprocesses: 100000\n", source="stoker.yaml")
    assert str(caught.value) == "stoker.yaml:2: processes: 100000 is more than one task can have: 1024"
    assert "`workers`" in (caught.value.hint or "")
    assert parse_job("run: python train.py\nprocesses: 1024\n").processes == 1024
    assert Job.from_json({"run": ["train"], "processes": 100_000}).processes == 100_000
