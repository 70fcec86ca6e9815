"""What is known of a provider's prompt cache and prices, by host and model: the shipped table and the user's own."""

import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1000)]
Patterns = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
STEP_TOKENS = 128  # in which a prefix is matched


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See `profiles.toml` for what each value means. Prices in units of an uncached input token."""

    name: str
    hosts: Patterns = ("*",)
    models: Patterns = ("*",)
    warm_s: Seconds
    cold_s: Seconds
    match: Literal["prefix", "requests"] = "prefix"
    minimum_tokens: Tokens = 1024
    read: Ratio
    write: Ratio = 1.0
    output: Ratio
    cliff_tokens: Tokens = 0
    cliff_factor: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    reasoning: Literal["bound", "free"] = "free"

    def fits(self, upstream: str, model: str) -> bool:
        """`upstream` is a URL; a pattern may name its host, or host and port."""
        parts = urlsplit(upstream.lower())
        hosts = (parts.hostname or "", parts.netloc)
        return any(fnmatchcase(host, pattern.lower()) for pattern in self.hosts for host in hosts) and any(
            fnmatchcase(model.lower(), pattern.lower()) for pattern in self.models
        )


@cache
def shipped() -> tuple[Profile, ...]:
    table = tomllib.loads(files("proxy.economics").joinpath("profiles.toml").read_text("utf-8"))
    return tuple(msgspec.convert(row, Profile) for row in table["profile"])


def with_own(rows: Iterable[dict[str, Any]]) -> tuple[Profile, ...]:
    """The user's profiles, then the shipped ones that they do not replace. Raises ValueError.

    A row that bears the name of a shipped one changes it; any other begins as the shipped `unknown`.
    """
    known = {profile.name: profile for profile in shipped()}
    own: dict[str, Profile] = {}
    for row in rows:
        name = row.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f'The profile {row!r} has no name. Give it one: name = "mine".')
        if name in own:
            raise ValueError(f"The profile {name!r} is there twice, and only one can count.")
        try:
            profile = msgspec.convert(msgspec.to_builtins(known.get(name, known["unknown"])) | row, Profile)
        except msgspec.ValidationError as exc:
            raise ValueError(f"In the profile {name!r}: {exc}.") from exc
        if profile.cold_s < profile.warm_s:
            raise ValueError(
                f"In the profile {name!r}: cold_s {profile.cold_s:g} is below warm_s {profile.warm_s:g}, "
                "but a prefix cannot be gone while it is surely there."
            )
        own[name] = profile
    return (*own.values(), *(profile for name, profile in known.items() if name not in own))


def profile_of(profiles: Sequence[Profile], upstream: str, model: str) -> Profile:
    """The first that fits; the shipped `unknown` fits everything unless the user narrowed it."""
    return next((profile for profile in profiles if profile.fits(upstream, model)), shipped()[-1])
