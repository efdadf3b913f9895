"""Brings known files over the network, going on where an earlier attempt stopped. Knows addresses and checksums, no text."""

import http.client
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from transformer_xl.console import progress
from transformer_xl.data.corpora.recipes import Place, Recipe
from transformer_xl.errors import DataError
from transformer_xl.files import cache_folder, digest

BLOCK = 1 << 18
ATTEMPTS = 5
"""Cut connections in a row, none of which brought a byte, before giving up."""
SECONDS_WITHOUT_AN_ANSWER = 30
LIST_OF_PLACES = "the list of known places is at the end of txl prepare --help and in docs/data.md"


def download_any(recipe: Recipe, *, vocabulary: bool = False) -> Path:
    """The corpus, or its vocabulary file, from the first place that answers."""
    reasons = []
    for place in recipe.vocabulary_places if vocabulary else recipe.places:
        try:
            return download(place, into=cache_folder() / recipe.name)
        except DataError as error:
            reasons.append(str(error))
    files = " and ".join(f"{file.name} (md5 {file.md5})" if file.md5 else file.name for file in recipe.files)
    wanted = f"{files} with `source=FILE_OR_FOLDER`"
    if vocabulary:
        wanted = f"{recipe.vocabulary_file} with `vocabulary_file=FILE`"
    raise DataError(f"{'; '.join(reasons)}; bring {wanted}; {LIST_OF_PLACES}")


def download(place: Place, *, into: Path) -> Path:
    """The file at `place`, whole and verified. What has come so far waits in a `.part` file beside it."""
    target = into / place.file_name
    if target.exists():
        return target
    try:
        return _download(place, target)
    except OSError as error:
        raise DataError(f"{into} cannot be written: {error.strerror or error}; set another XDG_CACHE_HOME") from error


def _download(place: Place, target: Path) -> Path:
    part = target.with_name(place.file_name + ".part")
    if part.exists() and part.stat().st_size > place.at_most:
        part.unlink()  # no beginning of that file
    failures = 0
    while not (done := _fetch(place, part)).whole:
        if done.too_long:
            part.unlink(missing_ok=True)
            raise DataError(
                f"{place.address} is not the file we know: it has {done.too_long:,} bytes or more, where there are at most {place.at_most:,}"
            )
        failures = 0 if done.brought else failures + 1
        if failures == ATTEMPTS or (failures and not done.may_return):
            have = (
                f", {part.stat().st_size:,} bytes are kept and the next run goes on from there" if part.exists() else ""
            )
            raise DataError(f"{place.address} cannot be downloaded ({done.reason}{have})")
    if place.checksum is not None:
        algorithm, expected = place.checksum.split(":")
        if (found := digest(part, algorithm)) != expected:
            part.unlink()
            what = f"its {algorithm} is {found} and should be {expected}"
            raise DataError(f"{place.address} is not the file we know: {what}")
    os.replace(part, target)
    return target


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    whole: bool = False
    brought: int = 0
    too_long: int = 0
    may_return: bool = True
    reason: str = ""


def _fetch(place: Place, part: Path) -> _Outcome:
    """One connection's worth of the file, appended to `part`."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(place.address, headers={"User-Agent": "transformer-xl"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    brought = 0
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_WITHOUT_AN_ANSWER) as answer:
            if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
                have = 0  # the server sends everything again
            total = None if answer.length is None else have + answer.length
            if total is not None and total > place.at_most:
                return _Outcome(too_long=total)
            part.parent.mkdir(parents=True, exist_ok=True)
            with (
                part.open("ab" if have else "wb") as file,
                progress(f"downloading {place.file_name}", total=total, unit="bytes") as advance,
            ):
                advance(have)
                while data := answer.read(BLOCK):
                    brought += len(data)
                    if have + brought > place.at_most:
                        return _Outcome(too_long=have + brought)
                    file.write(data)
                    advance(len(data))
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            # Nothing lies beyond what we have: it was whole already, which its checksum decides.
            return _Outcome(whole=True)
        return _Outcome(may_return=False, reason=f"HTTP {error.code} {error.reason}")
    except urllib.error.URLError as error:
        return _Outcome(may_return=False, reason=str(error.reason))
    except (TimeoutError, ConnectionError, http.client.HTTPException, ssl.SSLError) as error:
        return _Outcome(brought=brought, reason=f"the connection broke: {error or type(error).__name__}")
    except ValueError as error:  # sent on to an address that is none
        return _Outcome(may_return=False, reason=str(error))
    if total is not None and have + brought < total:
        return _Outcome(brought=brought, reason=f"the connection ended after {have + brought:,} of {total:,} bytes")
    return _Outcome(whole=True)
