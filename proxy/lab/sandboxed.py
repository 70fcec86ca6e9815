"""What runs inside the sandbox: a judge, which knows the tests, and a solver, which runs the code that is tested.

Started by `sandbox` as a script of its own (`python -I -S`), so it imports the standard library alone. The judge forks
the solver before it reads the tests. They exchange JSON over two pipes: arguments one way, plain values the other. So
the code under test can neither read what is expected, nor end the judge, nor return an object that equals everything,
nor print a verdict: what it prints goes to /dev/null.

The solver gives up what it does not need before it runs anything: processor, memory and every byte of a file (rlimit),
root's capabilities, files but Python's own (Landlock), processes, signals, sockets and what outlives a process
(seccomp). What this system lacks is not in the list of guards that it reports.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

HEAD_BYTES = 8
FRAME_BYTES_MAX = 16 << 20  # of one message between the two
DETAIL_CHARS = 300
Json = Any

# -- values as JSON ----------------------------------------------------------------------------------------------------

SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def pack(value: object) -> Json:
    """Plain values as JSON, with their type. Raises TypeError for what is none."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, kind in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return [name, *map(pack, value)]
    if isinstance(value, dict):
        return ["dict", *([pack(key), pack(item)] for key, item in value.items())]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared here")


def unpack(value: Json) -> Any:
    if not isinstance(value, list):
        return value
    name, *items = value
    if name == "dict":
        return {unpack(key): unpack(item) for key, item in items}
    if name == "complex":
        return complex(*items)
    if name == "bytes":
        return bytes.fromhex(items[0])
    return SEQUENCES[name]([unpack(item) for item in items])


# -- frames ------------------------------------------------------------------------------------------------------------


def frame(value: Json) -> bytes:
    raw = json.dumps(value).encode()
    return struct.pack(">Q", len(raw)) + raw


def write_frame(fd: int, value: Json) -> None:
    left = memoryview(frame(value))
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int) -> Json:
    """Raises EOFError at the end, ValueError when the message is none or too long."""
    (size,) = struct.unpack(">Q", _read(fd, HEAD_BYTES))
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a value of {size} bytes is too long")
    return json.loads(_read(fd, size))


def _read(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# -- guards ------------------------------------------------------------------------------------------------------------


def limit(limits: dict[str, int]) -> None:
    for name, kind in (
        ("memory_bytes", resource.RLIMIT_AS),
        ("open_files", resource.RLIMIT_NOFILE),
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS knows no limit of memory
            resource.setrlimit(kind, (limits[name], limits[name]))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # of files: pipes and /dev/null are none


PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every architecture
LANDLOCK_VERSION_FLAG, LANDLOCK_PATH_BENEATH = 1, 1
# Bits of Landlock's file rights: EXECUTE, READ_FILE, READ_DIR are 0, 2 and 3, WRITE_FILE is 1.
READING, READ_FILE, WRITE_FILE = 0b1101, 0b100, 0b10
RIGHTS_BY_VERSION = (0, (1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1)


def confine_files() -> bool:
    """Nothing can be opened but what Python needs to read, and nothing made or removed (Landlock, Linux 5.13)."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION_FLAG)
    if version < 1:
        return False
    rights = RIGHTS_BY_VERSION[min(version, len(RIGHTS_BY_VERSION) - 1)]
    attributes = ctypes.create_string_buffer(struct.pack("=Q", rights))
    ruleset = libc.syscall(LANDLOCK_CREATE, attributes, 8, 0)
    if ruleset < 0:
        return False
    places = {path: READING for path in ["/usr", "/lib", "/lib64", ".", *sys.path] if os.path.isdir(path)}
    for path, access in {**places, "/dev/null": READ_FILE | WRITE_FILE}.items():
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access & rights, parent))
        if libc.syscall(LANDLOCK_ADD, ruleset, LANDLOCK_PATH_BENEATH, rule, 0) != 0:
            return False
        os.close(parent)
    done: bool = libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


# Calls that no function needs, by number: (x86-64, arm64); None where that architecture has none.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "unshare": (272, 97),
    "mount": (165, 40),
    "setns": (308, 268),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # BPF
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
X32_CALLS = 0x40000000


def filter_of(machine: str) -> bytes | None:
    """The seccomp program: refused calls fail with EPERM. None: the architecture is not known here."""
    if machine not in ARCHITECTURES:
        return None
    column, audit = ARCHITECTURES[machine]
    numbers = [number for row in REFUSED.values() if (number := row[column]) is not None]
    steps = [(JUMP_EQUAL, number) for number in numbers] + [(JUMP_AT_LEAST, X32_CALLS)]
    count = len(steps)
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 0, count + 2, audit), (LOAD, 0, 0, 0)]
    program += [(code, count - i, 0, value) for i, (code, value) in enumerate(steps)]
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def refuse_calls() -> bool:
    """No process, signal, socket or mode of a file from here on (seccomp, Linux 3.5)."""
    program = filter_of(platform.machine())
    if sys.platform != "linux" or program is None:
        return False
    code = ctypes.create_string_buffer(program, len(program))
    fprog = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    done: bool = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, fprog, 0, 0) == 0
    return done


CAPABILITIES_VERSION_3 = 0x20080522


def drop_capabilities() -> None:
    """Root keeps its name alone: limits and permissions bind it from here on."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITIES_VERSION_3, 0))
    ctypes.CDLL(None).capset(header, ctypes.create_string_buffer(24))


def give_up() -> list[str]:
    """The guards that took hold."""
    guards = ["rlimit"]
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # root is not bound by it; by seccomp it is
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        drop_capabilities()
        guards += ["landlock"] if confine_files() else []
        guards += ["seccomp"] if refuse_calls() else []
    return guards


# -- the two -----------------------------------------------------------------------------------------------------------


def solve(job: Json, receive: int, answer: int) -> NoReturn:
    """Run the code, then its function for every list of arguments that comes; ends when none comes any more."""
    write_frame(answer, {"guards": give_up()})
    names: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(job["helpers"], "helpers", "exec"), names)
        exec(compile(job["code"], "solution", "exec"), names)
        function = names[job["function"]]
        write_frame(answer, {"ready": True})
    except BaseException as error:
        write_frame(answer, {"error": _said(error)})
        os._exit(1)
    while True:
        arguments, named = unpack(read_frame(receive))
        try:
            reply = {"value": pack(function(*arguments, **named))}
        except BaseException as error:
            reply = {"error": _said(error)}
        write_frame(answer, reply)


class SolverGone(BaseException):
    """No test may take this for an error of its own."""


def judge(job: Json) -> Json:
    """Fork the solver, then read the tests and run them. Returns {"passed", "detail", "guards"}."""
    (receive, send), (listen, answer) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _keep_only(receive, answer)
            solve(job, receive, answer)
        finally:
            os._exit(1)
    os.close(receive)
    os.close(answer)
    found: Json = {"passed": False, "detail": "", "guards": []}
    try:
        found["guards"] = read_frame(listen)["guards"]
        started = read_frame(listen)
        if "error" in started:
            found["detail"] = started["error"]
        else:
            found["detail"] = _check(job, read_frame(0)["test"], send, listen)
            found["passed"] = not found["detail"]
    except (EOFError, OSError):
        found["detail"] = "the code ended its process"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def _keep_only(*kept: int) -> None:
    """Close whatever else is open: the tests, and the way to say that they passed."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    for fd in range(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _check(job: Json, test: str, send: int, listen: int) -> str:
    """What is wrong, "" when nothing is."""
    gone = ""

    def candidate(*arguments: object, **named: object) -> Any:
        nonlocal gone
        packed = pack([list(arguments), named])
        try:
            write_frame(send, packed)
            reply = read_frame(listen)
            if "error" in reply:
                raise RuntimeError(str(reply["error"]))
            return unpack(reply["value"])
        except (EOFError, OSError):
            gone = "the code ended its process"
        except (ValueError, TypeError, KeyError, IndexError) as error:
            gone = f"no value came back: {error}"
        raise SolverGone

    names: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(job["helpers"], "helpers", "exec"), names)
        names[job["function"]] = candidate
        exec(compile(test, "tests", "exec"), names)
        names["check"](candidate)
    except BaseException as error:
        return gone or _said(error)
    return gone


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL_CHARS]


def main() -> None:
    verdict = os.dup(1)
    os.dup2(2, 1)  # the tests may print; what counts goes where they do not write
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    job = read_frame(0)
    sys.set_int_max_str_digits(0)
    limit(job["limits"])
    write_frame(verdict, judge(job))


if __name__ == "__main__":
    main()
