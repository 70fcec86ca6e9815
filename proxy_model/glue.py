"""What a chat template puts around messages, as token ids: before the first, between two, after the last.

Derived once from the template itself: short conversations with a marker for each text are rendered, and what stands
between the markers is the glue. So a text needs no search in a rendered whole, and it is encoded once however the
conversation goes on. A conversation always goes on here: what a template adds to its last answer only (the empty
`<think>` of some) is left out, or every turn would change the tokens of the one before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from proxy_model.context import Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES: tuple[Role, ...] = get_args(Role)
_Seen = Mapping[tuple[Role | None, Role], str]
LINE = "\n\n"
Render = Callable[[Sequence[Mapping[str, str]]], str]  # messages to text; raises whatever it likes

# A role that the template refuses speaks as another one: Gemma knows no tools, some templates know no system.
_SPEAKS_AS: Mapping[Role, Role] = {"system": "user", "tool": "user"}

# The least ordinary conversation that leads to a role, and one that follows it. It ends with the user's words, so that
# no answer in it is the last.
_UP_TO: Mapping[Role, tuple[Role, ...]] = {
    "system": ("system",),
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "tool": ("user", "assistant", "tool"),
}
_AFTER: Mapping[Role, tuple[Role, ...]] = {
    "system": ("user", "assistant", "user"),
    "user": ("assistant", "user"),
    "assistant": ("user",),
    "tool": ("assistant", "user"),
}

# Where a role stands in an ordinary conversation: a template that refuses it there does not know it.
_PLACE: Mapping[Role, Role | None] = {"system": None, "tool": "assistant"}


@dataclass(frozen=True, slots=True)
class Glue:
    """Defined for every sequence of roles, also for those that the template refuses."""

    before: Mapping[tuple[Role | None, Role], tuple[int, ...]]  # (role before or None at the start, role)
    after: Mapping[Role, tuple[int, ...]]  # when that role has the last word
    from_template: bool = True  # False: the tokenizer has none that can be used, and headings stand for it


@dataclass(frozen=True, slots=True)
class Marks:
    """The same as text."""

    before: Mapping[tuple[Role | None, Role], str]
    after: Mapping[Role, str]


def glue_of(tokenizer: "PreTrainedTokenizerBase") -> Glue:
    """By the tokenizer's chat template; with `### Role` headings if it has none or none that can be used."""
    marks = marks_of(lambda messages: _rendered(tokenizer, messages)) if tokenizer.chat_template else None
    start = "" if marks else _beginning(tokenizer)
    chosen = marks or headings(start)
    return Glue(
        before={pair: _control(tokenizer, text) for pair, text in chosen.before.items()},
        after={role: _control(tokenizer, text) for role, text in chosen.after.items()},
        from_template=marks is not None,
    )


def headings(start: str = "") -> Marks:
    """For a base model without a template: a heading for each message, after what the tokenizer begins a text with."""
    before = {(a, b): f"{start if a is None else LINE}### {b.title()}\n" for a in (None, *ROLES) for b in ROLES}
    return Marks(before, dict.fromkeys(ROLES, "\n"))


def marks_of(render: Render) -> Marks | None:
    """None when the template cannot even render a user's words, an answer and the user's next words."""
    pairs = {(a, b): _between(render, a, b) for a in (None, *ROLES) for b in ROLES}
    seen = _trusted({pair: text for pair, text in pairs.items() if text is not None})
    closings = {role: _closing(render, role) for role in ROLES}
    after = {role: text for role, text in closings.items() if text is not None}
    if not {(None, "user"), ("user", "assistant"), ("assistant", "user")} <= seen.keys() or not (
        {"user", "assistant"} <= after.keys()
    ):
        return None
    headers = {role: _header(seen, after, role) for role in ROLES}
    before = {(a, b): _join(seen, after, headers, a, b) for a in (None, *ROLES) for b in ROLES}
    return Marks(before, {role: after.get(role, after["user"]) for role in ROLES})


def _trusted(seen: _Seen) -> _Seen:
    """Without what a template renders by accident: it checks that every other message is the user's, and no names."""
    unknown = {role for role, place in _PLACE.items() if (place, role) not in seen}
    inside = unknown if ("assistant", "system") in seen else unknown | {"system"}
    return {(a, b): text for (a, b), text in seen.items() if a not in unknown and b not in (inside if a else unknown)}


def _join(seen: _Seen, after: Mapping[Role, str], headers: Mapping[Role, str | None], a: Role | None, b: Role) -> str:
    """What stands before `b`: as rendered, or put together from what closes `a` and what opens `b`."""
    if (a, b) in seen:
        return seen[a, b]
    header = headers[b]
    if header is None:
        return _join(seen, after, headers, a, _SPEAKS_AS.get(b, "user"))
    if a is None:
        return _opening(seen, headers) + header
    return after.get(a, after["user"]) + header


def _header(seen: _Seen, after: Mapping[Role, str], role: Role) -> str | None:
    """What opens a message of that role in the middle of a conversation, without what closes the one before."""
    for previous in ("assistant", "user", "tool", "system"):
        text, closing = seen.get((previous, role)), after.get(previous)
        if text is not None and closing is not None and text.startswith(closing):
            return text.removeprefix(closing)
    # An answer and the user's words are always rendered; where nothing can be taken off, all of it opens.
    return seen["user", "assistant"] if role == "assistant" else seen["assistant", "user"] if role == "user" else None


def _opening(seen: _Seen, headers: Mapping[Role, str | None]) -> str:
    """What a conversation begins with, whoever speaks first."""
    first, header = seen[None, "user"], headers["user"] or ""
    return first.removesuffix(header) if first.endswith(header) else ""


def _between(render: Render, a: Role | None, b: Role) -> str | None:
    before = _UP_TO[a] if a is not None else ()
    pieces = _pieces(render, (*before, b, *_AFTER[b]))
    return pieces[len(before)] if pieces else None


def _closing(render: Render, role: Role) -> str | None:
    pieces = _pieces(render, _UP_TO[role])
    return pieces[-1] if pieces else None


def _pieces(render: Render, roles: Sequence[Role]) -> list[str] | None:
    """The text around each message, one piece more than messages. None if the template refuses, drops or reorders."""
    markers = [f"Marker{i}Q" for i in range(len(roles))]
    try:
        rest = render([{"role": role, "content": text} for role, text in zip(roles, markers, strict=True)])
    except Exception:  # a template is a program of somebody else's: it may raise anything
        return None
    pieces = []
    for marker in markers:
        if rest.count(marker) != 1:
            return None
        piece, _, rest = rest.partition(marker)
        pieces.append(piece)
    return [*pieces, rest]


def _rendered(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]) -> str:
    return str(tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=False))


def _control(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    """Ids of the template's own text: here a control token is one."""
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]) if text else ()


def _beginning(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The token that the tokenizer puts before every text, if it does."""
    ids = tokenizer("a")["input_ids"]
    begins = bool(ids) and ids[0] == tokenizer.bos_token_id
    return str(tokenizer.bos_token) if begins else ""
