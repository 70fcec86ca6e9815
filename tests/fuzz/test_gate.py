"""Host and Origin of any bytes: whoever is let in names this machine, or comes from the proxy's own origin."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.gate import check_caller
from proxy.settings import Settings
from tests.fuzz.wild import damaged

# A name may end in dots; what ends in .localhost is this machine everywhere (RFC 6761).
OWN_NAME = re.compile(rb"(127(\.\d+){3}|([^:/?#@\[\]]+\.)?localhost|\[[0:]*1\])\.*(:\d*)?", re.IGNORECASE)
HOSTS = st.sampled_from([b"127.0.0.1:8787", b"localhost", b"[::1]:8787", b"evil.test", b"127.0.0.1.evil.test"])


@given(HOSTS | HOSTS.flatmap(damaged) | st.binary(max_size=20))
@example(b"127.0.0.1.")
@example(b"127.0.0.1@evil.test")
@example(b"evil.test#127.0.0.1")
def test_no_host_but_this_machines_own_names_is_let_in(host: bytes) -> None:
    if check_caller([(b"host", host)], Settings()) is None:
        assert OWN_NAME.fullmatch(host)


ORIGINS = st.sampled_from(
    [b"http://127.0.0.1:8787", b"http://localhost:8787", b"null", b"https://evil.test", b"file://"]
)


@given(ORIGINS | ORIGINS.flatmap(damaged) | st.binary(min_size=1, max_size=20))
@example(b"http://127.0.0.1:8788")
@example(b"http://127.0.0.1:8787.evil.test")
def test_no_origin_but_our_own_is_let_in(origin: bytes) -> None:
    if origin and check_caller([(b"host", b"127.0.0.1:8787"), (b"origin", origin)], Settings()) is None:
        assert origin.partition(b"://")[2] == b"127.0.0.1:8787"
