"""What no client and no provider would send on purpose: bytes cut, damaged and put together at random."""

from typing import Any

from hypothesis import strategies as st

from proxy.dialects.base import DialectName

Json = dict[str, Any]

WORDS = (
    "role type content text refusal tool_calls tool_call_id function function_call custom id call_id name arguments "
    "input output action command stdout stderr item response status error message code usage choices index delta "
    "finish_reason reasoning_details prompt_tokens cached_tokens input_transformations model stream tools messages path"
).split()
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "narrator")
TYPES = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
    "web_search_call", "image_generation_call", "item_reference", "compaction_trigger", "additional_tools",
    "response.completed", "response.output_item.done", "response.failed", "error", "novel",
)  # fmt: skip
IDS = ("a", "b", "c")
TEXTS = st.text(max_size=8)  # half surrogate pairs among them: JSON can spell those
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
    | st.sampled_from(ROLES + TYPES + IDS)
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | TEXTS, inner, max_size=5),
    max_leaves=20,
)


@st.composite
def messages(draw: st.DrawFn, dialect: DialectName) -> Json:
    """One message: a known form of any id, with members of any type put over it now and then."""
    found: Json = draw(_CHAT if dialect == "chat" else _RESPONSES)
    if draw(st.integers(0, 3)) == 0:
        found = found | draw(st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=3))
    return found


def _call(kind: str, **rest: Any) -> st.SearchStrategy[Json]:
    return st.sampled_from(IDS).map(lambda found: {"type": kind, "call_id": found, **rest})


_CHAT: st.SearchStrategy[Json] = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(ROLES), TEXTS),
    st.just({"role": "user", "content": "u"}),
    st.just({"role": "assistant", "content": "a"}),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=3).map(
        lambda ids: {"role": "assistant", "tool_calls": [{"id": i, "function": {"name": "edit"}} for i in ids]}
    ),
    st.sampled_from(IDS).map(lambda found: {"role": "tool", "tool_call_id": found, "content": "r"}),
    st.sampled_from(IDS).map(lambda found: {"role": "assistant", "function_call": {"name": found}}),
    st.sampled_from(IDS).map(lambda found: {"role": "function", "name": found, "content": "r"}),
)
_RESPONSES: st.SearchStrategy[Json] = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(ROLES), TEXTS),
    st.just({"role": "user", "content": "u"}),
    st.just({"type": "message", "role": "assistant", "content": "a"}),
    st.just({"type": "reasoning", "summary": []}),
    *(_call(kind, name="edit") for kind in TYPES if kind.endswith("_call")),
    *(_call(kind, output="r") for kind in TYPES if kind.endswith("_output")),
    st.sampled_from(IDS).map(lambda found: {"type": "local_shell_call", "id": found, "call_id": "c", "action": {}}),
    st.sampled_from(TYPES).map(lambda kind: {"type": kind, "id": "a"}),
)


_SPLINTERS = st.binary(min_size=1, max_size=4) | st.sampled_from(
    [b"\x00", b"\xff", b'"', b"\\", b"{", b"]", b",", b"\r", b"\n", b"\xef\xbb\xbf"]
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with some of its bytes lost, doubled, changed, or others among them."""
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted((draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))))
        new = draw(_SPLINTERS)
        lost, doubled = [whole[:start], whole[start:], whole[:start] + whole[end:]], whole[:end] + whole[start:]
        changed, added = whole[:start] + new + whole[start + len(new) :], whole[:start] + new + whole[start:]
        whole = draw(st.sampled_from([*lost, doubled, changed, added]))
    return whole


@st.composite
def cut(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    """`whole` in pieces: byte by byte, or at some places; empty pieces among them."""
    if draw(st.integers(0, 5)) == 0:
        return [bytes([byte]) for byte in whole]
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:end] for start, end in zip([0, *places], [*places, len(whole)], strict=True)]
