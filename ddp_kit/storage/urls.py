"""URLs of folders in object storage. A setting or argument that is a folder may be such a URL, as text."""

import re
from importlib.util import find_spec
from pathlib import Path

from ddp_kit.errors import ConfigError, nearest

SCHEMES = {"s3": "Amazon S3 and compatible stores", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
"""The schemes of URLs of object stores, with their names."""

Location = Path | str
"""A folder on disk as a path, or one in object storage as a URL."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOST_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]")
_CHECKPOINT = re.compile(r"(.+?)/((?:set-aside-[\w-]+/)?step-\d{8,})")
_BRANCH = re.compile(r"(.+?)/(set-aside-[\w-]+)")
_OTHER_SCHEMES = {
    "file": "pass the path without `file://`",
    "hf": "save on disk or in s3://, gs:// or az://, then `ddpkit export` the weights and upload that file",
    "s3a": "write s3://",
    "gcs": "write gs://",
    "abfs": "write az://CONTAINER/PATH, with the account in AZURE_STORAGE_ACCOUNT_NAME",
    "abfss": "write az://CONTAINER/PATH, with the account in AZURE_STORAGE_ACCOUNT_NAME",
    "azure": "write az://CONTAINER/PATH, with the account in AZURE_STORAGE_ACCOUNT_NAME",
}
_ENDPOINT = "for a store that is compatible with S3, write s3://BUCKET/PATH and set AWS_ENDPOINT_URL"


def is_url(place: object) -> bool:
    """Whether a folder is in object storage, or is meant to be: whether it is text that begins with a scheme."""
    return isinstance(place, str) and _URL.match(place) is not None


def location(place: str | Path) -> Location:
    """A folder as the user wrote it: a checked URL without a slash at its end, or a path.

    Raises `ConfigError` for a URL that cannot be used. Messages do not contain what may be a password.
    """
    if isinstance(place, Path):
        if _LOST_SLASH.match(str(place)):
            raise ConfigError(
                f"{str(place)!r} is a Path made from a URL, which lost a slash", "pass the URL as text (str)"
            )
        return place
    found = _URL.match(place)
    if found is None:
        return Path(place)
    scheme = found[1].lower()
    rest = found[2].rstrip("/")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        close = nearest(scheme, [*SCHEMES])
        hint = _OTHER_SCHEMES.get(scheme, "use one of these, or a path on disk")
        if scheme in ("http", "https"):
            hint = _ENDPOINT
        elif close is not None and scheme not in _OTHER_SCHEMES:
            hint = f"did you mean {close}://?"
        raise ConfigError(f"checkpoints cannot be saved in {scheme}://; use {known}", hint)
    bucket, _, path = rest.partition("/")
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            f"a {scheme}:// URL has a user or a password, which files and messages would show",
            "remove it from the URL, and set the credentials in the environment",
        )
    if "?" in rest or "#" in rest:
        raise ConfigError(
            f"{scheme}://{bucket}: the URL has a query or a fragment ('?' or '#')",
            "remove it; set the endpoint, region and credentials in the environment",
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        raise ConfigError(f"{place!r} has no bucket", f"write {scheme}://BUCKET/PATH")
    if not path:
        raise ConfigError(
            f"{place!r} is a whole bucket, but checkpoints need a folder in it", f"write {scheme}://{bucket}/PATH"
        )
    if any(part in ("", ".", "..") for part in path.split("/")) or not path.isprintable():
        raise ConfigError(
            f"{place!r} has an empty component, '.' or '..' in its path, or a character that cannot be printed",
            f"write {scheme}://{bucket}/PATH, with one slash between two names",
        )
    return f"{scheme}://{rest}"


def checked_location(place: str | Path) -> Location:
    """`location`, for a setting or argument that is used at once: also checks that the client is installed."""
    found = location(place)
    if is_url(found):
        check_client()
    return found


def check_client() -> None:
    """Raise `ConfigError` unless the client of object stores is installed. Does not import it."""
    if find_spec("obstore") is None:
        raise ConfigError("checkpoints in object storage need the package obstore", "pip install 'ddpkit[cloud]'")


def split(url: str) -> tuple[str, str]:
    """The URL of a run, and the place of a checkpoint in it: `step-...` or `set-aside-.../step-...`; "" for a run."""
    found = _CHECKPOINT.fullmatch(url)
    if found is None:
        return url, ""
    return found[1], found[2]


def split_branch(url: str) -> tuple[str, str]:
    """The URL of a run, and the name of the folder of an abandoned branch in it; "" for a run."""
    found = _BRANCH.fullmatch(url)
    if found is None:
        return url, ""
    return found[1], found[2]


def local_path(place: str | Path, what: str) -> Path:
    """A path on disk. Raises `ConfigError` for a URL. `what`: the file or folder, such as "the folder of profiles"."""
    text = str(place)
    if _LOST_SLASH.match(text):
        text = text.replace(":/", "://", 1)
    if _URL.match(text) is None:
        return Path(place)
    shown = re.sub(r"(://)[^/]*@", r"\1", text)  # without what may be a password
    raise ConfigError(f"{what} must be on a disk, but {shown} is a URL", "pass a path")
