"""recap show: a session turn by turn: what was decided, sent and left out, and what the provider counted."""

import argparse
from collections.abc import Sequence
from itertools import groupby

from graphstore.records import ExchangeRow, SelectionRow, SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from proxy.commands.text import duration, moment, number, plain, share, table
from proxy.settings import Settings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("show", help="show a session turn by turn")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    parser.add_argument("--turn", type=int, metavar="N", help="only this turn, with every block that it left out")
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = reader.find_session(arguments.session)
        exchanges = reader.session_exchanges(session.id)
        _print_head(reader, session, exchanges)
        wanted = [row for row in exchanges if arguments.turn in (None, row.turn)]
        if not wanted and arguments.turn is not None:
            print(f"no turn {arguments.turn}: this session has turns 0 to {session.turns}")
            return 1
        for turn, rows in groupby(wanted, key=lambda row: row.turn):
            _print_turn(reader, turn, list(rows), every_block=arguments.turn is not None)
        _print_totals(reader, wanted)
    return 0


def _print_head(reader: Reader, session: SessionRow, exchanges: Sequence[ExchangeRow]) -> None:
    print(f"{session.name}  {session.client} · {session.model} · {session.dialect} · {session.upstream}")
    print(f"  {plain(session.title)}")
    if session.parent_id is not None:
        parent = reader.load_session(session.parent_id)
        shared = f", sharing {session.fork_depth} messages" if session.fork_depth else ""
        print(f"  branch of {parent.name if parent else session.parent_id}{shared}")
    if session.state != "normal":
        print(f"  PASS-THROUGH: {session.state_reason}")
    removed = sum(row.transformations for row in exchanges)
    if removed:
        print(f"  the provider removed {removed} reasoning items whose history had changed")


def _print_turn(reader: Reader, turn: int, rows: list[ExchangeRow], *, every_block: bool) -> None:
    first = rows[0]
    print(f"\nturn {turn}  {moment(first.started_at)}  {first.boundary}: {plain(first.reason)}")
    made = next((s for s in (reader.selection_of(row.id) for row in rows) if s is not None), None)
    if made is not None:
        _print_selection(reader, made, every_block=every_block)
    lines = []
    for row in rows:
        full, sent = reader.exchange_tokens(row)
        lines.append(
            (
                row.step,
                row.outcome,
                f"{row.messages_sent}/{row.messages_total}",
                f"{row.blocks_total - row.blocks_left_out}/{row.blocks_total}",
                number(full),
                number(sent),
                number(row.input_tokens),
                number(row.cached_tokens),
                number(row.output_tokens),
                f"{row.prefix_messages} msg",
                f"{row.status or '-'} {row.ending}" + (" (original sent again)" if row.fell_back else ""),
                duration(row.ended_at - row.started_at if row.ended_at else None),
            )
        )
    header = (
        "step", "outcome", "messages", "blocks", "tokens", "sent", "input", "cached", "output", "prefix", "status", "took",
    )  # fmt: skip
    text = table(header, lines, right=("step", "tokens", "sent", "input", "cached", "output"))
    print("\n".join(f"  {line}" for line in text.splitlines()))
    for row in rows:
        if row.error:
            print(f"  step {row.step}: {plain(row.error)}")


def _print_selection(reader: Reader, selection: SelectionRow, *, every_block: bool) -> None:
    left = [v for v in selection.verdicts if not v.kept]
    kept = len(selection.verdicts) - len(left)
    verb = "sent" if selection.applied else "would have sent (mode off)"
    print(
        f"  {verb} {kept} of {len(selection.verdicts)} history blocks: {number(selection.cost)} of "
        f"{number(selection.total_cost)} characters (budget {number(selection.budget)}, "
        f"protected {number(selection.protected_cost)})"
    )
    if not every_block:
        if left:
            print(f"  left out {len(left)} blocks; `recap show SESSION --turn {selection.turn}` lists them")
        return
    tokens = reader.block_tokens(selection.session_id)
    labels = {block.ordinal: block for block, _ in reader.load_blocks(selection.session_id)}
    rows = [
        (
            "kept" if v.kept else "left out",
            v.ordinal,
            labels[v.ordinal].kind if v.ordinal in labels else None,
            number(tokens.get(v.ordinal)),
            f"{v.rule}: {v.detail}" if v.detail else v.rule,
            plain(labels[v.ordinal].label) if v.ordinal in labels else "",
        )
        for v in selection.verdicts
    ]
    text = table(("", "block", "kind", "tokens", "why", "what"), rows, right=("block", "tokens"))
    print("\n".join(f"  {line}" for line in text.splitlines()))


def _print_totals(reader: Reader, rows: Sequence[ExchangeRow]) -> None:
    """What the rewriting saved, by the provider's own numbers where it reports them."""
    full = sent = 0
    for row in rows:
        before, after = reader.exchange_tokens(row)
        full, sent = full + before, sent + after
    reported = [row for row in rows if row.input_tokens is not None]
    total = sum(row.input_tokens or 0 for row in reported)
    cached = sum(row.cached_tokens or 0 for row in reported)
    print(f"\n{len(rows)} requests, {number(full)} tokens as the client sent them, {number(sent)} as sent on", end="")
    print(f" ({share(full - sent, full)} less)" if sent < full else "")
    if reported:
        print(
            f"provider: {number(total)} input tokens in {len(reported)} answers, "
            f"{number(cached)} of them cached ({share(cached, total)})"
        )
        rewritten = [row for row in reported if row.messages_sent < row.messages_total]
        if rewritten:
            print(f"saved: about {number(sum(_saved(reader, row) for row in rewritten))} input tokens "
                  f"in {len(rewritten)} rewritten requests (provider's count, scaled by what was left out)")  # fmt: skip
    else:
        print("provider: no usage reported")


def _saved(reader: Reader, row: ExchangeRow) -> int:
    """Input tokens that this request did not need: the provider's count times left out / sent by our tokenizer."""
    full, sent = reader.exchange_tokens(row)
    return round((row.input_tokens or 0) * (full - sent) / sent) if sent else 0
