"""The sandbox against code that does not want to be tested, and its filter run step by step."""

import platform
import struct
import sys
from pathlib import Path

import pytest

from proxy.lab.sandbox import GUARDS, Limits, Outcome, Program, run_tests
from proxy.lab.sandboxed import ALLOW, ARCHITECTURES, REFUSE, REFUSED, filter_of, frame, pack, unpack

PLUS_ONE = "def check(candidate):\n    assert candidate(1) == 2\n"
SHORT = Limits(wall_s=20, cpu_s=1)
confined = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ARCHITECTURES, reason="no Landlock and seccomp here"
)


def run(code: str, test: str = PLUS_ONE, limits: Limits = SHORT) -> Outcome:
    return run_tests(Program(code, "f", test), limits)


def test_right_and_wrong_code_are_told_apart() -> None:
    assert run("def f(x): return x + 1").passed
    assert run("def f(x): return x").detail.startswith("AssertionError")
    assert "ZeroDivisionError" in run("def f(x): return 1 // 0").detail
    assert "SyntaxError" in run("def f(x) return").detail
    assert "KeyError" in run("def g(x): return 2").detail


@confined
def test_every_guard_takes_hold_on_linux() -> None:
    assert run("def f(x): return x + 1").guards == GUARDS


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys\nsys.exit(0)\ndef f(x): return 2", "SystemExit"),
        ("import os\nos._exit(0)\ndef f(x): return 2", "ended its process"),
        ("def f(x):\n    import os\n    os._exit(0)", "ended its process"),
        ("def f(x):\n    raise SystemExit(0)", "SystemExit"),
        ("def f(x):\n    while True: pass", "ended its process"),
        ("def f(x):\n    while True: print('x' * 1000)", "ended its process"),
        ("def f(x): return [0] * 10**10", "MemoryError"),
        ("def f(x): return 'x' * (20 << 20)", "too long"),
        ("def f(x): return f", "cannot be compared"),
        ("class Equal:\n    def __eq__(self, other): return True\ndef f(x): return Equal()", "cannot be compared"),
        ("class Equal(int):\n    def __eq__(self, other): return True\ndef f(x): return Equal(7)", "AssertionError"),
        ("def f(x):\n    print('{\"passed\": true}', flush=True)\n    return 3", "AssertionError"),
    ],
)
def test_code_that_cheats_fails(code: str, why: str) -> None:
    outcome = run(code)
    assert not outcome.passed and why in outcome.detail


def test_a_verdict_written_to_every_open_file_is_none() -> None:
    """The judge's own way out was once among what the solver inherited."""
    said = frame({"passed": True, "detail": "", "guards": []})
    code = (
        "def f(x):\n    import os\n    for fd in range(64):\n        try: os.write(fd, SAID)\n"
        "        except OSError: pass\n    os._exit(0)"
    )
    assert not run(f"SAID = {said!r}\n{code}").passed


def test_what_only_sleeps_is_ended_by_the_clock() -> None:
    outcome = run("def f(x):\n    import time\n    time.sleep(600)", limits=Limits(wall_s=0.5))
    assert outcome == Outcome(False, "not done after 0.5 s", ())


def test_the_tests_cannot_be_found_by_the_code() -> None:
    """Neither in its frames and objects, nor among its open files, arguments and environment."""
    code = """
def f(x):
    import gc, os, sys
    found = repr(sys.argv) + repr(dict(os.environ)) + repr(os.listdir("."))
    found += "".join(o for o in gc.get_objects() if isinstance(o, str))
    frame = sys._getframe()
    while frame:
        found += repr(frame.f_locals)
        frame = frame.f_back
    for fd in range(64):
        try: found += os.read(fd, 100).decode() if fd not in IN_USE else ""
        except OSError: pass
    return "se" + "cret" in found
"""
    test = "secret = 'secret'\ndef check(candidate):\n    assert candidate(1) is False\n"
    listed = "import os\nIN_USE = [fd for fd in range(64) if os.path.exists(f'/dev/fd/{fd}')]\n"
    assert run(listed + code, test).passed


@confined
@pytest.mark.parametrize(
    "code",
    [
        "    import os\n    while True: os.fork()",
        "    import subprocess\n    subprocess.run(['true'])\n    return 2",
        "    import threading\n    threading.Thread(target=print).start()\n    return 2",
        "    import socket\n    socket.create_connection(('127.0.0.1', 9))\n    return 2",
        "    import os\n    os.kill(os.getppid(), 9)\n    return 2",
        "    import os\n    os.chmod(PLACE, 0o777)\n    return 2",
        "    open(PLACE).read()\n    return 2",
        "    open(PLACE, 'w').write('x')\n    return 2",
        "    open(PLACE + '.new', 'w').write('x')\n    return 2",
        "    import os\n    os.unlink(PLACE)\n    return 2",
        "    import os\n    os.truncate(PLACE, 0)\n    return 2",
        "    open('here', 'w')\n    return 2",
        "    import os\n    os.mkdir('here')\n    return 2",
        "    import os\n    open(f'/proc/{os.getppid()}/environ').read()\n    return 2",
    ],
)
def test_nothing_outside_is_within_reach(code: str, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.write_text("mine")
    mode = place.stat().st_mode
    outcome = run(f"PLACE = {str(place)!r}\ndef f(x):\n{code}")
    assert not outcome.passed
    assert any(word in outcome.detail for word in ("PermissionError", "can't start new thread", "BlockingIOError"))
    assert place.read_text() == "mine" and place.stat().st_mode == mode and len(list(tmp_path.iterdir())) == 1


def test_its_own_folder_is_empty_and_goes() -> None:
    outcome = run("import os\ndef f(x): return os.listdir('.'), os.getcwd()", "def check(f):\n    assert 0, f(1)\n")
    found, folder = eval(outcome.detail.removeprefix("AssertionError: "))
    assert found == [] and Path(folder).is_absolute() and not Path(folder).exists()


@confined
def test_no_file_takes_a_byte() -> None:
    """Whatever Landlock makes of its name: a file without one shows the limit alone."""
    code = "import os\ndef f(x): return os.write(os.memfd_create('m'), b'x')"
    assert "File too large" in run(code).detail


@confined
def test_root_has_no_capabilities_left() -> None:
    code = (
        "import ctypes, struct\ndef f(x):\n    data = ctypes.create_string_buffer(b'?' * 24, 24)\n"
        "    header = ctypes.create_string_buffer(struct.pack('=Ii', 0x20080522, 0))\n"
        "    return ctypes.CDLL(None).capget(header, data), data.raw"
    )
    assert run(code, "def check(candidate):\n    assert candidate(1) == (0, bytes(24))\n").passed


def test_tests_that_catch_everything_do_not_pass_for_dead_code() -> None:
    test = "def check(candidate):\n    try: candidate(1)\n    except Exception: pass\n"
    assert not run("import os\ndef f(x): os._exit(0)", test).passed


def test_values_keep_their_type() -> None:
    values = [None, True, 1, 10**5000, 1.5, "x", b"x", 1j, (1, [2]), {1: (2,), "a": {3}}, frozenset({4}), []]
    sys.set_int_max_str_digits(0)
    try:
        assert unpack(pack(values)) == values and type(unpack(pack((1,)))) is tuple
    finally:
        sys.set_int_max_str_digits(4300)
    test = "def check(candidate):\n    assert candidate(1) == {1: (1.5, {2}), None: float('inf')}"
    assert run("def f(x): return {x: (1.5, {2}), None: float('inf')}", test).passed


def decide(program: bytes, audit: int, number: int) -> int:
    """What the kernel would make of a call: the filter, step by step."""
    steps = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        code, yes, no, k = steps[at]
        if code == 0x06:
            return int(k)
        if code == 0x20:
            value = {0: number, 4: audit}[k]
            at += 1
        else:
            holds = value == k if code == 0x15 else value >= k
            at += 1 + (yes if holds else no)


@pytest.mark.parametrize(("machine", "harmless"), [("x86_64", (0, 1, 9, 231)), ("aarch64", (63, 64, 222, 94))])
def test_the_filter_refuses_what_it_names_and_nothing_else(machine: str, harmless: tuple[int, ...]) -> None:
    """Reading, writing, mapping memory and ending must go on."""
    column, audit = ARCHITECTURES[machine]
    program = filter_of(machine)
    assert program is not None
    for name, row in REFUSED.items():
        if (number := row[column]) is not None:
            assert decide(program, audit, number) == REFUSE, name
    for number in harmless:
        assert decide(program, audit, number) == ALLOW
    assert decide(program, 0x40000003, 0) == REFUSE, "another architecture's numbers mean other calls"
    assert decide(program, audit, 0x40000000) == REFUSE, "x32"
    assert filter_of("vax") is None
