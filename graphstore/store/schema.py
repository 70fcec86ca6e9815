"""Tables of the archive, one to one with `graphstore.records`.

Core definitions only, portable to PostgreSQL. The views that people read live in the migrations, because a view is text
of one database. References that would close a cycle (`sessions.selection_id`, `exchanges.selection_id`) carry no
constraint; `verify` checks them. Ids come from the caller, so no column counts by itself.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)

REVISION = "0004"  # head of migrations/versions; a database of another revision is migrated or refused

COUNT_MAX = 2**40  # beyond any real count, and a million of them still add up within 64 bits


class PlainText(TypeDecorator[str]):
    """Text for people. Lone surrogates and NUL, which no database stores, become U+FFFD and a blank."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or value.isascii():
            return value.replace("\0", " ") if value else value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", " ")


class Count(TypeDecorator[int]):
    """A number that another party reported: clamped, never a reason to lose the row."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        return None if value is None else max(0, min(COUNT_MAX, value))


Id = BigInteger().with_variant(Integer(), "sqlite")  # in SQLite only INTEGER makes the key the row's own address

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _id() -> Column[int]:
    return Column("id", Id, primary_key=True, autoincrement=False)


def _reference(name: str, target: str, *, null: bool = True) -> Column[int]:
    return Column(name, Id, ForeignKey(target), nullable=null)


def _key(name: str, target: str) -> Column[int]:
    return Column(name, Id, ForeignKey(target), primary_key=True, autoincrement=False)


def _number(name: str) -> Column[int]:
    return Column(name, Integer, nullable=False)


meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", LargeBinary, nullable=False))

messages = Table(
    "messages",
    metadata,
    _id(),
    Column("digest", LargeBinary, nullable=False),
    Column("codec", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),
    _number("size"),
    _number("tokens"),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("digest"),
)

nodes = Table(
    "nodes",
    metadata,
    _id(),
    Column("digest", LargeBinary, nullable=False),
    _reference("parent_id", "nodes.id"),
    _reference("message_id", "messages.id", null=False),
    _number("depth"),
    UniqueConstraint("digest"),
)

sessions = Table(
    "sessions",
    metadata,
    _id(),
    Column("name", PlainText, nullable=False),
    Column("scope", LargeBinary, nullable=False),
    Column("upstream", PlainText, nullable=False),
    Column("dialect", Text, nullable=False),
    Column("client", PlainText, nullable=False),
    Column("client_id", PlainText),
    Column("kind", Text, nullable=False),
    Column("model", PlainText, nullable=False),
    _reference("instructions_id", "messages.id"),
    _reference("tools_id", "messages.id"),
    _reference("parent_id", "sessions.id"),
    Column("fork_depth", Integer),
    _reference("head_node_id", "nodes.id"),
    Column("state", Text, nullable=False),
    Column("state_reason", PlainText),
    _number("turns"),
    Column("selection_id", Id),
    Column("created_at", Double, nullable=False),
    Column("last_active_at", Double, nullable=False),
    Column("title", PlainText, nullable=False),
    Column("evidence", Text, nullable=False, server_default=text("''")),  # the rule that u was derived by; '': none yet
    Column("arm", Text),  # of the comparison with sessions left untouched; NULL: nothing was drawn
    UniqueConstraint("name"),
    Index(None, "scope", "client_id"),
    Index(None, "scope", "last_active_at"),
    Index(None, "head_node_id"),
)

blocks = Table(
    "blocks",
    metadata,
    _key("session_id", "sessions.id"),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    _number("cost"),
    Column("edits", PlainText, nullable=False),  # JSON array of paths
    Column("label", PlainText, nullable=False),
    Column("u", Double, nullable=False, server_default=text("0")),
    Column("observed", Boolean, nullable=False, server_default=text("false")),
    Column("stale", Boolean, nullable=False, server_default=text("false")),
    sqlite_with_rowid=False,
)

block_nodes = Table(
    "block_nodes",
    metadata,
    Column("session_id", Id, primary_key=True, autoincrement=False),
    _key("node_id", "nodes.id"),
    _number("ordinal"),
    ForeignKeyConstraint(["session_id", "ordinal"], ["blocks.session_id", "blocks.ordinal"]),
    Index(None, "node_id"),
    sqlite_with_rowid=False,
)

edges = Table(
    "edges",
    metadata,
    _key("session_id", "sessions.id"),
    Column("support", Integer, primary_key=True, autoincrement=False),
    Column("dependent", Integer, primary_key=True, autoincrement=False),
    Column("weight", Double, nullable=False),
    _number("position"),
    sqlite_with_rowid=False,
)

exchanges = Table(
    "exchanges",
    metadata,
    _id(),
    _reference("session_id", "sessions.id"),
    _number("turn"),
    _number("step"),
    Column("started_at", Double, nullable=False),
    Column("path", PlainText, nullable=False),
    Column("dialect", Text, nullable=False),
    Column("model", PlainText, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("boundary", Text, nullable=False),
    Column("reason", PlainText, nullable=False),
    Column("idle_s", Double),
    Column("selection_id", Id),
    _reference("head_node_id", "nodes.id"),
    _reference("instructions_id", "messages.id"),
    _reference("tools_id", "messages.id"),
    _number("blocks_total"),
    _number("blocks_left_out"),
    _number("messages_total"),
    _number("messages_sent"),
    _number("chars_total"),
    _number("chars_sent"),
    _number("bytes_total"),
    _number("bytes_sent"),
    _number("prefix_messages"),
    _number("prefix_bytes"),
    Column("first_byte_at", Double),
    Column("ended_at", Double),
    Column("status", Integer),
    Column("ending", Text, nullable=False),
    Column("fell_back", Boolean, nullable=False),
    Column("usage", PlainText),
    Column("input_tokens", Count),
    Column("cached_tokens", Count),
    Column("cache_write_tokens", Count),
    Column("output_tokens", Count),
    Column("reasoning_tokens", Count),
    Column("response_id", PlainText),
    _number("transformations"),
    Column("error", PlainText),
    Index(None, "session_id"),
)

answers = Table(
    "answers",
    metadata,
    _key("exchange_id", "exchanges.id"),
    Column("position", Integer, primary_key=True, autoincrement=False),
    _reference("message_id", "messages.id", null=False),
    sqlite_with_rowid=False,
)

selections = Table(
    "selections",
    metadata,
    _id(),
    _reference("session_id", "sessions.id", null=False),
    _reference("exchange_id", "exchanges.id", null=False),
    _number("turn"),
    Column("created_at", Double, nullable=False),
    Column("applied", Boolean, nullable=False),
    Column("reason", PlainText, nullable=False),
    Column("parameters", PlainText, nullable=False),
    _number("budget"),
    _number("cost"),
    _number("protected_cost"),
    _number("total_cost"),
    Column("notice", Boolean, nullable=False),
    Index(None, "session_id"),
)

selection_blocks = Table(
    "selection_blocks",
    metadata,
    _key("selection_id", "selections.id"),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("kept", Boolean, nullable=False),
    Column("rule", Text, nullable=False),
    Column("detail", PlainText, nullable=False),
    Column("score", Double),
    Column("z_u", Double),
    Column("z_lex", Double),
    Column("z_past", Double),
    Column("exploration", Double),
    Column("rank", Integer),
    sqlite_with_rowid=False,
)

replay_jobs = Table(
    "replay_jobs",
    metadata,
    Column("id", Id, primary_key=True),  # numbered by the database: two processes add and nobody refers to it
    _reference("session_id", "sessions.id", null=False),
    _number("turn"),
    _reference("exchange_id", "exchanges.id", null=False),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("queued_at", Double, nullable=False),
    Column("claimed_at", Double),
    Column("ended_at", Double),
    Column("error", PlainText),
    UniqueConstraint("session_id", "turn"),
    Index(None, "state", "queued_at"),
)

observations = Table(
    "observations",
    metadata,
    Column("id", Id, primary_key=True),
    _reference("session_id", "sessions.id", null=False),
    _number("turn"),
    _number("since_turn"),
    _reference("exchange_id", "exchanges.id", null=False),
    Column("created_at", Double, nullable=False),
    Column("model", PlainText, nullable=False),
    Column("parameters", BigInteger, nullable=False),
    Column("device", PlainText, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("layers", Text, nullable=False),  # JSON array
    _number("dependency_layer"),
    _number("tokens"),
    _number("tokens_computed"),
    _number("rows"),
    _number("rows_assistant"),
    Column("unobserved", Text, nullable=False),  # JSON array of ordinals
    Column("seconds", Double, nullable=False),
    UniqueConstraint("session_id", "turn"),
)

observation_blocks = Table(
    "observation_blocks",
    metadata,
    _key("observation_id", "observations.id"),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    _number("tokens"),
    Column("mass", Double, nullable=False),
    Column("density", Double, nullable=False),
    Column("mass_assistant", Double, nullable=False),
    Column("density_assistant", Double, nullable=False),
    Column("by_layer", LargeBinary, nullable=False),  # float32, see `store.replays`
    Column("replaced", Boolean, nullable=False),  # a later block of this observation replaces it: the stale rule
    sqlite_with_rowid=False,
)

observation_edges = Table(
    "observation_edges",
    metadata,
    _key("observation_id", "observations.id"),
    Column("support", Integer, primary_key=True, autoincrement=False),
    Column("dependent", Integer, primary_key=True, autoincrement=False),
    Column("mass", Double, nullable=False),
    sqlite_with_rowid=False,
)

inheritances = Table(
    "inheritances",
    metadata,
    _key("session_id", "sessions.id"),
    _reference("parent_id", "sessions.id", null=False),
    Column("ordinals", Text, nullable=False),  # JSON array: the blocks that both share
    Column("turn", Integer, nullable=False),  # the parent's observations up to this turn are inherited
)

marks = Table(
    "marks",
    metadata,
    _key("session_id", "sessions.id"),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("mark", Text, nullable=False),  # pin, mute
    Column("made_at", Double, nullable=False),
    sqlite_with_rowid=False,
)

workers = Table(
    "workers",
    metadata,
    Column("name", Text, primary_key=True),
    _number("pid"),
    Column("state", Text, nullable=False),
    Column("model", PlainText, nullable=False),
    Column("device", PlainText, nullable=False),
    Column("problem", PlainText),
    Column("updated_at", Double, nullable=False),
)
