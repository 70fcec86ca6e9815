"""A made-up session as the batches that the proxy would submit: consistent digests, one block for each message."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphstore.identity import chain_digests, message_digest, row_id
from graphstore.records import (
    AnswerRow,
    Batch,
    BlockRow,
    ExchangeRow,
    MessageRow,
    NodeRow,
    SelectionRow,
    SessionRow,
    VerdictRow,
)

SCOPE = b"scope of tests.."
START = 1_796_000_000.0  # 2026-11-30 00:53:20 UTC


def message(text: str) -> MessageRow:
    raw = text.encode("utf-8", "surrogatepass")
    digest = message_digest(raw)
    return MessageRow(row_id(digest), digest, raw, text)


def session_row(id: int = 1, **changes: object) -> SessionRow:
    row = SessionRow(
        id=id, name=f"s-{id:05}", scope=SCOPE, upstream="https://api.example/v1", dialect="chat", client="opencode",
        client_id=f"ses_{id}", kind="agent", model="gpt-test", instructions_id=None, tools_id=None, parent_id=None,
        fork_depth=None, head_node_id=None, state="normal", state_reason=None, turns=0, selection_id=None,
        created_at=START, last_active_at=START + id, title=f"Session {id}",
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


def exchange_row(id: int = 1, session_id: int | None = 1, **changes: object) -> ExchangeRow:
    row = ExchangeRow(
        id=id, session_id=session_id, turn=id, step=0, started_at=START + id, path="/v1/chat/completions",
        dialect="chat", model="gpt-test", stream=True, outcome="extension", boundary="warm", reason="idle for 60 s",
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


def selection_row(id: int = 1, session_id: int = 1, exchange_id: int = 1, left_out: Sequence[int] = ()) -> SelectionRow:
    return SelectionRow(
        id=id, session_id=session_id, exchange_id=exchange_id, turn=1, created_at=START, applied=True,
        reason="idle for 3600 s", parameters='{"beta": 0.1}', budget=100, cost=60, protected_cost=20, total_cost=600,
        notice=True,
        verdicts=(
            VerdictRow(0, True, "protected", "user"),
            *(VerdictRow(i, False, "left out", "did not fit", 0.5, 0.25, 0.25, 0.0, 3) for i in left_out),
        ),
    )  # fmt: skip


@dataclass
class History:
    """Grows one message at a time; `grow` gives the batch that archives what is new."""

    session_id: int = 1
    texts: list[str] = field(default_factory=list)
    exchanges: int = 0

    chain: list[bytes] = field(default_factory=list)
    rows: list[MessageRow] = field(default_factory=list)

    @property
    def head(self) -> int:
        return row_id(self.chain[-1])

    def grow(self, *texts: str, exchange: bool = True) -> Batch:
        known = len(self.texts)
        self.exchanges += 1
        self.texts += texts
        self.rows += map(message, texts)
        self.chain += chain_digests(self.chain[-1] if known else SCOPE, [row.digest for row in self.rows[known:]])
        rows, chain = self.rows, self.chain
        ids = [row_id(link) for link in chain]
        new = range(known, len(rows))
        row = session_row(
            self.session_id, head_node_id=self.head, turns=self.exchanges, last_active_at=START + self.exchanges
        )
        return Batch(
            messages=tuple(rows[i] for i in new),
            nodes=tuple(NodeRow(ids[i], chain[i], ids[i - 1] if i else None, rows[i].id, i) for i in new),
            sessions=(row,),
            blocks=tuple(
                BlockRow(self.session_id, i, "user", len(rows[i].content), (ids[i],), (), self.texts[i][:40])
                for i in new
            ),
            exchanges=(exchange_row(self.exchanges, self.session_id, head_node_id=self.head),) if exchange else (),
        )

    def answer(self, text: str) -> Batch:
        row = message(text)
        return Batch(messages=(row,), answers=(AnswerRow(self.exchanges, 0, row.id),))
