"""What went wrong with a request, in words, and what a person can do about it. Pure."""

from graphstore.records import ExchangeRow


def has_failed(row: ExchangeRow) -> bool:
    """It ended, and not well. A client that left is no failure."""
    return row.error is not None or (row.status or 200) >= 400 or row.ending in ("upstream broken", "failed")


def explained(row: ExchangeRow) -> tuple[str, str]:
    """Problem and remedy, of a request that failed."""
    if row.fell_back:
        return row.error or "the upstream rejected the rewritten request", (
            "the client's own request was sent instead and the session is left alone from now on; please report it"
        )
    if row.ending == "running":
        return "the proxy was stopped while the answer ran", "nothing: clients try again, and that is a new request"
    match row.status:
        case 401 | 403:
            return f"the upstream refused the credentials ({row.status})", "check the key that the client sends"
        case 408 | 504:
            return (
                row.error or f"the upstream took too long ({row.status})",
                "try again; raise read_timeout if it lasts",
            )
        case 429:
            return "the upstream limits the rate (429)", "wait, or raise the limit of the account"
        case 404:
            return "the upstream does not know the path or the model (404)", "check `upstream` and the model's name"
        case int() as status if 400 <= status < 500:
            return row.error or f"the upstream refused the request ({status})", "the client has its answer: see there"
        case int() as status if status >= 500:
            return row.error or f"the upstream failed ({status})", "try again later"
        case _:
            return row.error or f"the exchange ended early ({row.ending})", "check the setting upstream and the network"
