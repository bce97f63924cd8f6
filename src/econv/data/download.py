"""Downloads that appear whole and checked, or not at all."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from econv.data.archives import check_md5, md5
from econv.data.errors import DataError, reason
from econv.data.sources import File
from econv.files import locked
from econv.progress import Progress

_TRIES = 3
_TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 18


def fetched(file: File, folder: Path) -> Path:
    """Download one official file; it appears in the folder whole and checked, or not at all.

    What an interrupted download left is taken up again.
    """
    target, part = folder / file.name, folder / f"{file.name}.part"
    problems = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{file.name}.lock", wait=True):
            if target.is_file():  # another process was faster
                check_md5(target, file)
                return target
            for address in (f"{place}{file.name}" for place in file.folders):
                for _ in range(_TRIES):
                    try:
                        resumed = _fetch(address, part)
                    except (OSError, http.client.HTTPException) as error:
                        problems.append(f"{address}: {reason(error)}")
                        if isinstance(error, urllib.error.HTTPError) and error.code != 416:
                            break  # it is not there
                        continue
                    digest = md5(part)
                    if digest == file.md5:
                        os.replace(part, target)
                        return target
                    problems.append(f"{address}: MD5 {digest} instead of {file.md5}")
                    part.unlink()
                    if not resumed:
                        break  # a whole file, and a wrong one
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written ({reason(error)}); name another folder as root or in "
            "the environment variable ECONV_DATA"
        ) from error
    tried = "; ".join(dict.fromkeys(problems))
    raise DataError(
        f"{target}: could not be downloaded ({tried}). Get {file.name} (MD5 {file.md5}) in another "
        f"way, and put it into {folder} or name its folder as source"
    )


def _fetch(address: str, part: Path) -> bool:
    """Append to ``part`` what it lacks, or write it anew where the server cannot resume.

    Returns whether what lay there before was kept.
    """
    begun = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "econv"})
    if begun:
        request.add_header("Range", f"bytes={begun}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing lies beyond what is there
            if _total(error.headers.get("Content-Range")) == begun:
                return True
            part.unlink()
        raise
    with response:
        headers = response.headers
        resumed = getattr(response, "status", None) == 206 and str(
            headers.get("Content-Range", "")
        ).startswith(f"bytes {begun}-")
        if not resumed:
            begun = 0
        length = headers.get("Content-Length")
        total = begun + int(length) if length is not None and length.isdigit() else None
        of = f" of {total / 1e6:.1f}" if total is not None else ""
        with (
            part.open("ab" if resumed else "wb") as stream,
            Progress(part.stem, total, lambda rate: f"{rate / 1e6:.1f} MB/s") as bar,
        ):
            bar.skip(begun)
            while block := response.read(_BLOCK):
                stream.write(block)
                bar.advance(len(block), f"{stream.tell() / 1e6:.1f}{of} MB")
    size = part.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the connection ended after {size} of {total} bytes")
    return resumed


def _total(content_range: str | None) -> int | None:
    total = (content_range or "").rpartition("/")[2]
    return int(total) if total.isdigit() else None
