"""What torch allocates, operation by operation: the sizes that a profiler of Python's memory does not see."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Watch:
    """Bytes, of storages: a view of a tensor is not counted again."""

    def __init__(self) -> None:
        self.largest = 0
        self.peak = 0
        self.operations: Counter[str] = Counter()
        self._live: dict[int, list[int]] = {}  # storage -> bytes, tensors that hold it

    def saw(self, operation: str, tensors: list[Any], known: set[int]) -> None:
        self.operations[operation] += 1
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata in known:
                continue
            self.largest = max(self.largest, storage.nbytes())
            self._live.setdefault(storage._cdata, [storage.nbytes(), 0])[1] += 1
            weakref.finalize(tensor, self._gone, storage._cdata)
        self.peak = max(self.peak, sum(size for size, _ in self._live.values()))

    def _gone(self, storage: int) -> None:
        self._live[storage][1] -= 1
        if not self._live[storage][1]:
            del self._live[storage]


@contextmanager
def watching(network: Any) -> Iterator[Watch]:
    """Everything but the weights of `network`."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    watch = Watch()
    weights = {tensor.untyped_storage()._cdata for tensor in [*network.parameters(), *network.buffers()]}

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            watch.saw(func.name(), [leaf for leaf in tree_leaves(out) if hasattr(leaf, "untyped_storage")], weights)
            return out

    with Mode():
        yield watch
