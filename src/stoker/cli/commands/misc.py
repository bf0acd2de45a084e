"""`stoker schema`, `stoker completion`, `stoker version`."""

from __future__ import annotations

from stoker.cli.context import Context
from stoker.cli.params import JSON, Argument, Command


def schema(ctx: Context) -> int:
    from stoker.spec import job_schema  # lazy: pydantic

    ctx.json(job_schema())
    return 0


def completion(ctx: Context, *, shell: str) -> int:
    from stoker.cli.complete import SCRIPTS

    ctx.out.write(SCRIPTS[shell])
    return 0


def version(ctx: Context, *, as_json: bool) -> int:
    from stoker import __version__

    if not as_json:
        ctx.print(f"stoker {__version__}")
        return 0
    import platform  # lazy: only for --json

    ctx.json({"version": __version__, "python": platform.python_version(), "platform": platform.platform()})
    return 0


COMMANDS = {
    "schema": Command(
        "schema",
        schema,
        summary="the JSON Schema of a job file, for editors",
        help="Print the JSON Schema of a job file. Editors use it to complete and check stoker.yaml.",
        examples=[("stoker schema > stoker.schema.json", "")],
        shapes="a JSON Schema",
    ),
    "completion": Command(
        "completion",
        completion,
        summary="completion for bash, zsh or fish",
        help="Print the completion script of a shell. Runs are completed only while the server runs: completing never "
        "starts one.",
        arguments=[Argument("shell", kind=("bash", "zsh", "fish"))],
        examples=[
            ('eval "$(stoker completion bash)"', "in ~/.bashrc"),
            ('eval "$(stoker completion zsh)"', "in ~/.zshrc"),
            ("stoker completion fish | source", "in config.fish"),
        ],
    ),
    "version": Command(
        "version",
        version,
        summary="the version of this program",
        options=[JSON],
        shapes="`{version, python, platform}`",
    ),
}
