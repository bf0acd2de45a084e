from __future__ import annotations

import pytest

from stoker.errors import SpecError
from stoker.images.reference import Reference

SHA = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "host", "path", "tag", "digest"),
    [
        ("torch", "docker.io", "library/torch", "latest", None),
        ("team/torch", "docker.io", "team/torch", "latest", None),
        ("docker.io/torch:2", "docker.io", "library/torch", "2", None),
        ("index.docker.io/team/torch", "docker.io", "team/torch", "latest", None),
        ("quay.io/team/torch:2.9", "quay.io", "team/torch", "2.9", None),
        ("Quay.IO/team/torch:2.9", "quay.io", "team/torch", "2.9", None),
        ("localhost/torch", "localhost", "torch", "latest", None),
        ("localhost:5000/a/b/c:x", "localhost:5000", "a/b/c", "x", None),
        ("127.0.0.1:5000/torch", "127.0.0.1:5000", "torch", "latest", None),
        ("[::1]:5000/torch:1", "[::1]:5000", "torch", "1", None),
        (f"quay.io/x@{SHA}", "quay.io", "x", None, SHA),
        (f"quay.io/x:2@{SHA}", "quay.io", "x", "2", SHA),
        ("host:5000/x__y/z--w.v", "host:5000", "x__y/z--w.v", "latest", None),
    ],
)
def test_parts(text: str, host: str, path: str, tag: str | None, digest: str | None) -> None:
    found = Reference.parse(text)
    assert (found.host, found.path, found.tag, found.digest) == (host, path, tag, digest)
    assert Reference.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no repository"),
        ("Torch", "lower case: 'library/torch'"),
        ("quay.io/Team/x", "lower case: 'team/x'"),
        ("https://quay.io/x", "no scheme"),
        ("docker://quay.io/x", "no scheme"),
        ("quay.io/x@sha256:12", "not a digest"),
        ("quay.io/x:" + "t" * 129, "not a tag"),
        ("quay.io/x:", "not a tag"),
        ("quay.io/../etc", "not a repository"),
        ("quay.io/x y", "not a repository"),
        ("quay.io/x?y=1", "not a repository"),
        ("quay.io//x", "not a repository"),
        ("user@quay.io/x", "not a digest"),
        ("quay.io:99999/x", "not a host"),
        ("-bad-.io/x", "not a host"),
        ("quay.io/" + "x" * 256, "longer than 255"),
        ("quay.io/x\n", "not a repository"),
    ],
)
def test_invalid_references(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Reference.parse(text)


def test_a_scheme_is_explained() -> None:
    with pytest.raises(SpecError) as caught:
        Reference.parse("https://quay.io/x:1")
    assert caught.value.hint == "Write 'quay.io/x:1'."


def test_docker_hub_has_its_own_api_host() -> None:
    assert Reference.parse("torch").api_host == "registry-1.docker.io"
    assert Reference.parse("quay.io/x").api_host == "quay.io"


def test_pinning_keeps_the_tag_for_display() -> None:
    assert str(Reference.parse("quay.io/x:2").pinned(SHA)) == f"quay.io/x:2@{SHA}"
    assert Reference.parse(f"quay.io/x:2@{SHA}").version == SHA
