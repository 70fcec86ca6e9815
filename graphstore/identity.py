"""Content identity: the hash of a message's raw bytes, and the hash chain that identifies a history.

Digests are BLAKE2b-128 over the bytes exactly as the client sent them; canonical JSON would hide differences that
matter on the wire. A chain starts from a scope, so equal histories of two tenants never meet.
"""

import hashlib
import hmac
from collections.abc import Iterable
from hashlib import blake2b

DIGEST_BYTES = 16


def message_digest(raw: bytes | memoryview) -> bytes:
    """16-byte digest of one message's raw JSON bytes."""
    return blake2b(raw, digest_size=DIGEST_BYTES).digest()


def scope_digest(secret: bytes, *, upstream: str, credential: bytes) -> bytes:
    """Root of all chains of one tenant at one upstream. The credential enters only through a keyed hash."""
    return hmac.new(secret, upstream.encode() + b"\0" + credential, hashlib.sha256).digest()[:DIGEST_BYTES]


def chain_digests(scope: bytes, digests: Iterable[bytes]) -> list[bytes]:
    """Digest of every prefix of a history: entry i identifies messages 0..i under this scope."""
    chain: list[bytes] = []
    link = scope
    for digest in digests:
        link = blake2b(link + digest, digest_size=DIGEST_BYTES).digest()
        chain.append(link)
    return chain


def row_id(digest: bytes) -> int:
    """Database id of a message or a chain node: the first 63 bits of its digest.

    Content decides the id, so the request path allocates nothing, looks nothing up, and writing twice is harmless. Two
    different messages among ten million meet with probability below 1e-5; `recap verify` would name them.
    """
    return int.from_bytes(digest[:8], "big") >> 1
