"""Files from the internet, checked, into a cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from edgefl.errors import ConfigError

TIMEOUT_S = 20.0
"""Of silence, not of the whole download."""
CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/edgefl, or ~/.cache/edgefl. Raises ConfigError where the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgefl"
    except RuntimeError as error:
        accepted = "a folder for what is downloaded: set HOME or XDG_CACHE_HOME, or give data.folder"
        raise ConfigError("HOME", None, accepted) from error


def download(url: str, md5: str, target: Path, key: str) -> Path:
    """Fetch a file to `target`, unless it is there, and check its MD5.

    Nothing is at `target` until all of it has come and has been checked.
    Raises ConfigError for `key`, naming the address and the reason.
    """
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as unchecked:
            part = Path(unchecked) / target.name
            found = _fetch(url, part)
            if found != md5:
                raise ConfigError(key, url, f"a file with MD5 {md5}; what came has {found}: try again later")
            os.replace(part, target)
    except (OSError, HTTPException) as error:  # URLError and time-outs are OSErrors
        if isinstance(error, HTTPError):
            error.close()  # it is the answer too, and holds the connection
        raise ConfigError(key, url, f"an address that answers ({error}); or give data.folder") from error
    return target


def _fetch(url: str, part: Path) -> str:
    """Write what the address holds to a file; its MD5."""
    digest = hashlib.md5(usedforsecurity=False)  # what the publishers give: against accidents, not attacks
    with part.open("wb") as out, urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        while chunk := answer.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()
