"""KV eviction as a row of `recap eval lic`: a local model that answers over what its cache has left (paper, Table 1).

It takes the place of the provider, whose cache nobody can reach: compare it with the row `full` of the same model.
"""

import asyncio
import threading
from collections.abc import Sequence

from proxy.lab.chat_model import Answer
from proxy.lab.errors import LabError
from proxy_model.errors import ReplayError

TOKENS_MAX = 512  # of an answer, where no limit is given


class EvictingChat:
    """One answer at a time; each conversation has a cache of its own until it is over."""

    def __init__(self, name: str, *, temperature: float, max_tokens: int | None, seed: int) -> None:
        """Takes seconds. Raises `LabError`: no libraries, no weights, a model whose cache cannot be evicted."""
        from proxy_model.eviction import Memory, load_evicting

        self._name = name
        self._lock = threading.Lock()
        self._memories: dict[str, Memory] = {}
        try:
            self._model = load_evicting(name, temperature=temperature, tokens_max=max_tokens or TOKENS_MAX, seed=seed)
        except ReplayError as error:
            raise LabError(f"--kv-model {name!r}: {error}") from error

    async def ask(self, messages: Sequence[dict[str, str]], session: str) -> Answer:
        """Prompt tokens are what the cache held of the conversation, with the new message (paper, Appendix C)."""
        return await asyncio.to_thread(self._ask, messages, session)

    def _ask(self, messages: Sequence[dict[str, str]], session: str) -> Answer:
        with self._lock:
            memory = self._memories.setdefault(session, self._model.begin())
            try:
                given = self._model.answer(messages, memory)
            except ReplayError as error:
                raise LabError(f"--kv-model {self._name!r}: {error}") from error
        return Answer(given.text, given.context, given.made, shortened=given.evicted)

    def ended(self, session: str) -> None:
        self._memories.pop(session, None)
