"""`stoker export`."""

from __future__ import annotations

from typing import Any

from stoker.cli.context import Context
from stoker.cli.errors import UsageMistake
from stoker.cli.lookup import on_run
from stoker.cli.params import JSON, Argument, Command, Option
from stoker.cli.rendering import terminal

KINDS = ("job", "pytorchjob", "trainjob", "mpijob", "tfjob")


def export(
    ctx: Context, *, run: str, kind: str | None, image: str | None, namespace: str | None, as_json: bool
) -> int:
    from stoker.spec import Job  # lazy: pydantic
    from stoker.spec.interop.export import Source
    from stoker.spec.interop.export import export as exported
    from stoker.spec.interop.writer import to_yaml

    if kind is None:
        raise UsageMistake(
            "stoker export needs --as", hint=f"As in: stoker export {run} --as {'|'.join(KINDS)}"
        )
    whole = on_run(ctx, run, ctx.client.run)
    job = Job.from_json(whole["job"])
    if job.image is None:
        image = image or _default_image(ctx, job.cluster)
        if not image:
            raise UsageMistake(
                f"{whole['id']} names no image, and a manifest needs one",
                hint="Name one that has the code and what it needs: --image registry.example.com/team/train:1",
            )
    elif image:
        job = job.model_copy(update={"image": image})
    found = exported(Source(job, image or "", namespace or ""), kind)
    if as_json:
        ctx.json(found.manifest)
    else:
        for line in to_yaml([found.manifest]).splitlines():
            ctx.print(terminal.safe(line))
    for key in found.left_out:
        ctx.note(f"note: `{key}` is left out: a {kind} has no field for it")
    if job.secrets:
        ctx.note(f"note: it takes secrets from a Secret {job.name}-secrets, which you create")
    if whole.get("code") and not as_json:
        ctx.note("note: the code of the run is left out: build it into the image")
    return 0


def _default_image(ctx: Context, cluster: str | None) -> str:
    """The image that the run's cluster uses where a job names none."""
    if cluster is None:
        return ""
    listed: Any = ctx.client.clusters().get("clusters") or []
    for one in listed:
        if one.get("name") == cluster:
            return str((one.get("config") or {}).get("default_image") or "")
    return ""


COMMANDS = {
    "export": Command(
        "export",
        export,
        summary="write a run as a manifest of Kubernetes or Kubeflow",
        help="Write what a run asked for as a manifest, to run the same without Stoker. `stoker submit` "
        "reads it back. Keys that a manifest has no field for are listed.",
        arguments=[Argument("run", complete="run")],
        options=[
            Option("--as", dest="kind", kind=KINDS, help="The kind of manifest."),
            Option("--image", metavar="IMAGE", help="The image; default: the run's, else its cluster's."),
            Option("--namespace", metavar="NAME", help="Write this namespace into it."),
            JSON,
        ],
        examples=[
            ("stoker export digits-7f3k --as job --image registry.example.com/team/digits:1", ""),
            ("stoker export @last --as pytorchjob | kubectl apply -f -", ""),
        ],
        shapes="the manifest",
    )
}
