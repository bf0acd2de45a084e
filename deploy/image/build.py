"""Build Stoker's image, without Docker and without root.

    python deploy/image/build.py --push registry.example.com/stoker:0.1
    python deploy/image/build.py --output stoker.tar        # for `ctr images import`, `podman load`

The same checkout gives the same bytes. Run it with the Python of `make setup`. Downloads and layers are kept in
$XDG_CACHE_HOME/stoker-images, which may be deleted at any time. Logins for --push are those of `docker login`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from recipe import stoker

from stoker import __version__
from stoker.errors import StokerError
from stoker.images import HostRules, Logins, Registry
from stoker.images.build import Cache, Image, write_archive


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    started = time.monotonic()
    try:
        image = stoker.image(Cache(), arguments.arch)
        for layer in image.layers:
            print(f"{layer.size / 1e6:7.1f} MB  {layer.digest}  {layer.made_by}", file=sys.stderr)
        built = time.monotonic() - started
        print(f"{image.size / 1e6:7.1f} MB  {image.digest}  built in {built:.1f} s", file=sys.stderr)
        print(_deliver(image, arguments))
    except StokerError as exc:
        print(f"error: {exc.message}" + (f"\nhint: {exc.hint}" if exc.hint else ""), file=sys.stderr)
        return 1
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--push", metavar="REF", help="push it to a registry under this name")
    where.add_argument("--output", metavar="FILE", type=Path, help="write it as an OCI archive")
    parser.add_argument("--name", default=f"stoker:{__version__}", help="name inside the archive")
    parser.add_argument("--arch", choices=("amd64", "arm64"), default="amd64")
    parser.add_argument("--plain", action="append", default=[], metavar="HOST", help="registry without TLS")
    parser.add_argument("--ca-file", action="append", default=[], help="certificates to trust, in PEM")
    return parser.parse_args(argv)


def _deliver(image: Image, arguments: argparse.Namespace) -> str:
    """Push or write the image. Returns the reference with its digest, or the file."""
    if arguments.output:
        write_archive(image, arguments.output, arguments.name)
        return str(arguments.output)
    rules = HostRules(plain=tuple(arguments.plain), ca_files=tuple(arguments.ca_file))
    with Registry(logins=Logins.load(), rules=rules) as registry:
        started = time.monotonic()
        reference = registry.push(image, arguments.push)
        print(f"pushed in {time.monotonic() - started:.1f} s", file=sys.stderr)
        return str(reference)


if __name__ == "__main__":
    sys.exit(main())
