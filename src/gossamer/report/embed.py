"""Puts data, scripts and styles into a page such that no text can break out or load anything."""

from __future__ import annotations

import base64
import hashlib
import json


def embed_json(value: object) -> str:
    """Write a value as JSON for a `<script type="application/json">` block.

    `<`, `>` and `&` are written as escapes, so that no text in it ends the block or opens another.

    Raises:
        ValueError: The value holds NaN or an infinity, which JSON does not have.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def embed_script(source: str) -> str:
    r"""Write JavaScript for a `<script>` block.

    Line ends are normalised, as the parser would, so that its digest holds.

    Raises:
        ValueError: The source holds `</script` or `<!--`, which would end or change the block.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    for mark in ("</script", "<!--"):
        if mark in source.lower():
            raise ValueError(f"a script that holds {mark!r} cannot stand in a page")
    return source


def content_policy(scripts: list[str]) -> str:
    """Return the page's Content-Security-Policy.

    It lets run exactly the scripts given, by digest, and lets nothing be fetched: pictures and
    videos come from the page itself.
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; media-src data: blob:; base-uri 'none'; form-action 'none'"
    )
