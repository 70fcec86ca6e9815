"""Where a request goes: the upstream's base URL joined with the client's path. Pure.

The base is what one would give an SDK as its base URL, so `/v1` in front of a client's path means "the base":

1. a base without a path takes the client's path as it is;
2. so does a base whose first segment the client's path starts with (`/v1/...`, Azure's `/openai/...`);
3. a leading `/v1` is replaced by the base's path;
4. any other path is appended to the base's path.

Percent-encoding, case and query are the client's, byte for byte.
"""

import ipaddress
from urllib.parse import urlsplit

TO = "/to/"


def join_target(base: str, path: str, query: str) -> str:
    """`path` is the raw path, percent-encoding included; `query` comes without its question mark."""
    parts = urlsplit(base)
    root = parts.path.rstrip("/")
    first = "/".join(root.split("/", 2)[:2])
    if root and not _is_under(path, first):
        path = root + (path.removeprefix("/v1") if _is_under(path, "/v1") else path)
    return f"{parts.scheme}://{parts.netloc}{path}{'?' + query if query else ''}"


def split_name(path: str) -> tuple[str, str] | None:
    """`/to/NAME/v1/models` -> (`NAME`, `/v1/models`); None for a path without a name."""
    if not path.startswith(TO):
        return None
    name, _, rest = path.removeprefix(TO).partition("/")
    return name, "/" + rest


def is_loopback(host: str) -> bool:
    """True for names and addresses that only this machine reaches. 0.0.0.0 and :: are every interface: not loopback."""
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_under(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")
