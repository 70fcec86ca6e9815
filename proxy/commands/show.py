"""recap show: a session turn by turn: what was decided, sent and left out, and what the provider counted."""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby

from graphstore.records import ExchangeRow, SelectionRow, SessionRow
from graphstore.store.archive import open_reader
from graphstore.store.reader import Reader
from graphstore.store.report import Tokens, find_session, selection_of
from graphstore.store.session_map import session_map
from proxy.cache_watch import cache_fall
from proxy.commands.attention import attention_state, replay_line
from proxy.commands.drawing import SENT, SHADES, UNSEEN, as_lines
from proxy.commands.text import count, duration, moment, number, plain, share, table
from proxy.commands.words import BOUNDARIES, why
from proxy.dry_run import blocks_of
from proxy.holdout import HELD_OUT
from proxy.ledger import Account
from proxy.savings import account_of
from proxy.settings import Settings

LEGEND = (
    "messages, blocks: sent/all · tokens: as the client sent them, and as sent on (o200k) · "
    "input, cached, output: the provider's count\n"
    "unchanged: messages at the beginning that are the same as in the request sent before"
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    parser = subparsers.add_parser("show", help="show a session turn by turn")
    parser.add_argument("session", help="name of the session, or the beginning of it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--turn",
        type=int,
        metavar="N",
        help="only this turn, with every block of its selection, kept or left out, and why",
    )
    what.add_argument(
        "--map", action="store_true", help="draw it: a row a turn, blocks by size, attention and what was sent"
    )
    return parser


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with open_reader(settings.db) as reader:
        session = find_session(reader, arguments.session)
        if arguments.map:
            _print_map(reader, session)
            return 0
        exchanges = reader.session_exchanges(session.id)
        account = account_of(reader, settings, session, exchanges)
        _print_head(reader, session, exchanges, settings, removed=account.total(exchanges).reasoning_removed)
        jobs = {job.turn: job for job in reader.load_jobs(session.id)}
        replays = {replay.turn: replay for replay in reader.load_replays(session.id)}
        wanted = [row for row in exchanges if arguments.turn in (None, row.turn)]
        if not wanted and arguments.turn is not None:
            print(f"no turn {arguments.turn}: there are requests of {_turns(exchanges)}")
            return 1
        for turn, rows in groupby(wanted, key=lambda row: row.turn):
            _print_turn(reader, turn, list(rows), account.tokens, every_block=arguments.turn is not None)
            if line := replay_line(jobs.get(turn), replays.get(turn)):
                print(f"  {line}")
        _print_totals(wanted, account)
    return 0


def _print_map(reader: Reader, session: SessionRow) -> None:
    """In colour where people look at it and nothing forbids it (no-color.org)."""
    width, colour = shutil.get_terminal_size().columns, sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(f"{session.name}  {plain(session.title)}")
    print("\n".join(as_lines(session_map(reader, session.id), width, colour=colour)))
    scale = "from light to dark" if colour else SHADES
    print(f"width: tokens · attention a token: {scale} (cube root), {UNSEEN} not observed · {SENT} below: sent")


def _turns(exchanges: Sequence[ExchangeRow]) -> str:
    turns = sorted({row.turn for row in exchanges})
    if not turns:
        return "no turn"
    return f"turn {turns[0]}" if len(turns) == 1 else f"turns {turns[0]} to {turns[-1]}"


def _print_head(
    reader: Reader, session: SessionRow, exchanges: Sequence[ExchangeRow], settings: Settings, *, removed: int
) -> None:
    print(f"{session.name}  {session.client} · {session.model} · {session.dialect} · {session.upstream}")
    print(f"  {plain(session.title)}")
    if session.parent_id is not None:
        parent = reader.load_session(session.parent_id)
        shared = f", sharing {session.fork_depth} messages" if session.fork_depth else ""
        print(f"  branch of {parent.name if parent else session.parent_id}{shared}")
    if session.client_id is None:
        print("  known by its history alone: the client sends no id")
    if fall := cache_fall(exchanges):
        print(f"  CACHE: {fall}")
    if session.arm == "held out":
        print(f"  {HELD_OUT} (setting `holdout`)")
    if session.state != "normal":
        print(f"  PASS-THROUGH: {session.state_reason}")
    if session.kind == "agent":
        print(f"  {attention_state(reader, session.id, settings)}")
    if removed:
        print(f"  the provider removed {count(removed, 'reasoning item')} whose history had changed")


def _print_turn(
    reader: Reader, turn: int, rows: list[ExchangeRow], tokens: Mapping[int, Tokens], *, every_block: bool
) -> None:
    first = rows[0]
    print(f"\nturn {turn}  {moment(first.started_at)}  {BOUNDARIES[first.boundary]}: {plain(first.reason)}")
    made = next((s for s in (selection_of(reader, row.id) for row in rows) if s is not None), None)
    if made is not None:
        _print_selection(reader, made, every_block=every_block, is_refused=any(row.fell_back for row in rows))
    lines = []
    for row in rows:
        lines.append(
            (
                row.step,
                row.outcome,
                f"{row.messages_sent}/{row.messages_total}",
                f"{row.blocks_total - row.blocks_left_out}/{row.blocks_total}",
                number(tokens[row.id].full),
                number(tokens[row.id].sent),
                number(row.input_tokens),
                number(row.cached_tokens),
                number(row.output_tokens),
                number(row.prefix_messages),
                f"{row.status or '-'} {row.ending}" + (" (original sent again)" if row.fell_back else ""),
                duration(row.ended_at - row.started_at if row.ended_at else None),
            )
        )
    columns = "step outcome messages blocks tokens sent input cached output unchanged status took"
    text = table(columns.split(), lines, right=("step", "tokens", "sent", "input", "cached", "output", "unchanged"))
    print("\n".join(f"  {line}" for line in text.splitlines()))
    for row in rows:
        if row.error:
            print(f"  step {row.step}: {plain(row.error)}")


def _print_selection(reader: Reader, selection: SelectionRow, *, every_block: bool, is_refused: bool) -> None:
    left = [v for v in selection.verdicts if not v.kept]
    kept = len(selection.verdicts) - len(left)
    verb = "sent" if selection.applied else "would have sent (mode off)"
    if selection.applied and is_refused:
        verb = "the upstream refused, and got the original instead:"
    print(
        f"  {verb} {kept} of {len(selection.verdicts)} history blocks: {number(selection.cost)} of "
        f"{number(selection.total_cost)} characters (budget {number(selection.budget)}, "
        f"protected {number(selection.protected_cost)})"
    )
    if not every_block:
        if left and not is_refused:
            verb = "left out" if selection.applied else "would have left out"
            print(f"  {verb} {count(len(left), 'block')}; --turn {selection.turn} lists every one")
        return
    labels, tokens = blocks_of(reader, selection)
    rows = [
        (
            "kept" if v.kept else "left out",
            v.ordinal,
            labels[v.ordinal].kind if v.ordinal in labels else None,
            number(tokens.get(v.ordinal)),
            why(v),
            plain(labels[v.ordinal].label) if v.ordinal in labels else "",
        )
        for v in selection.verdicts
    ]
    text = table(("", "block", "kind", "tokens", "why", "what"), rows, right=("block", "tokens"))
    print("\n".join(f"  {line}" for line in text.splitlines()))


def _print_totals(rows: Sequence[ExchangeRow], account: Account) -> None:
    """What the rewriting saved, by the provider's own numbers where it reports them."""
    full = sum(account.tokens[row.id].full for row in rows)
    sent = sum(account.tokens[row.id].sent for row in rows)
    less = f" ({share(full - sent, full)} less)" if sent < full else ""
    print(f"\n{LEGEND}")
    print(
        f"{count(len(rows), 'request')}, {number(full)} tokens as the client sent them, {number(sent)} as sent on{less}"
    )
    sums = account.total(rows)
    if not sums.with_usage:
        print("provider: no usage reported")
        return
    print(
        f"provider: {number(sums.input)} input tokens in {count(sums.with_usage, 'answer')}, "
        f"{number(sums.cached)} of them cached ({share(sums.cached, sums.input)})"
    )
    if sums.rewritten:
        print(
            f"saved: about {number(round(sums.saved))} input tokens in "
            f"{count(sums.rewritten, 'rewritten request')} (what was left out, as the provider counts: "
            f"{account.per_token:.2f} of its tokens for one of ours)"
        )
