"""Secrets in text made unreadable, letter by letter: every other byte stays where it is, and so do lengths.

Patterns, no proof: what looks like a key of a known form, or stands behind a name such as `password=`. Working on the
bytes of JSON, it touches only letters inside of strings, so a message keeps its form, its kind and its cost.
"""

import json
import re

MASK = b"*"
# Where a word begins: in JSON a line begins behind the letter of its escape, too.
_BEGIN = rb"(?:(?<![A-Za-z0-9_])|(?<=\\[nrtbf])|(?<=\\u[0-9a-fA-F]{4}))"
_PEM_LINE = rb"(?:\s|\\+[nr]|\\+(?=[\\nr]))+[A-Za-z0-9+/=\\]{16,}"
_KEYS = re.compile(
    _BEGIN + rb"(?:sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"
    rb"|AKIA[0-9A-Z]{16}(?![0-9A-Za-z_])"
    rb"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}"
    rb"|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}"
    rb"|xox[abprs]-[A-Za-z0-9-]{10,}"
    rb"|AIza[A-Za-z0-9_-]{35}"
    rb"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
    rb"|(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{16,}"
    rb"|(?:(?<=PRIVATE KEY-----)|(?<=PRIVATE KEY BLOCK-----))"
    rb"(?:(?:[A-Za-z0-9+/=:,\s\\]|-(?!----)){16,}(?=-----END)"
    rb"|(?:" + _PEM_LINE + rb")+)"  # cut off before its end
)
_NAMED = re.compile(
    rb"(?i)(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|auth[_-]?token|token)"
    rb"(?:[\"'\\]*\s*[=:]\s*[\"'\\]*)"
    rb"(?!(?:true|false|null|-?[0-9][0-9.eE+-]*)\b)(?P<value>[!#-%*-+./-9:=?-Z^-z|~-]{4,})"
)
_IN_URL = re.compile(rb"(?<=://)[^\s:/@\"'\\]{1,64}:(?P<value>[^\s/@\"'\\]{3,256})(?=@)")
_LETTERS = re.compile(rb"\\+.|[^\s\\]")  # escapes stay, also those of JSON within JSON


def redact(raw: bytes) -> bytes:
    """The same bytes without secrets; `raw` itself when it holds none. Of valid JSON comes valid JSON."""
    known = _IN_URL.sub(_masked_value, _KEYS.sub(lambda found: _masked(found[0]), raw))
    named = _NAMED.sub(_masked_value, known)
    return named if named == known or _is_json(named) or not _is_json(raw) else known


def redact_text(text: str) -> str:
    """The same for text that people read."""
    return redact(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")


def _masked_value(found: re.Match[bytes]) -> bytes:
    whole, start = found[0], found.start("value") - found.start()
    return whole[:start] + _masked(whole[start:])


def _masked(secret: bytes) -> bytes:
    return _LETTERS.sub(lambda letter: letter[0] if len(letter[0]) > 1 else MASK, secret)


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True
