"""The memory of message facts stays bounded and forgets what was not used."""

from graphstore.blocks import Message
from proxy.dialects.facts import Facts, FactsMemory


def make_memory() -> tuple[FactsMemory, list[bytes]]:
    read: list[bytes] = []

    def read_facts(raw: bytes) -> Facts:
        read.append(raw)
        return Facts(Message("user", cost=len(raw)))

    return FactsMemory(read_facts, generation_count=4), read


def test_a_message_is_read_once() -> None:
    memory, read = make_memory()
    assert memory.get(b"1") is None
    facts = memory.put(b"1", b"raw")
    assert memory.get(b"1") is facts
    assert read == [b"raw"]


def test_what_is_used_stays_and_the_rest_is_forgotten() -> None:
    memory, _ = make_memory()
    memory.put(b"used", b"")
    memory.put(b"unused", b"")
    for number in range(50):
        memory.put(b"%d" % number, b"")
        assert memory.get(b"used") is not None
        assert len(memory) <= 8
    assert memory.get(b"unused") is None
