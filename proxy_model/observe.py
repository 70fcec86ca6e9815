"""A finished turn's context becomes a `Replay`: encode, choose rows, read them, reduce them to readings and edges.

Importing this module needs no torch; a `LoadedModel` has it.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from graphstore.replays import EDGE_MASS_MIN, BlockReading, LayerReading, Replay
from proxy_model import sampling
from proxy_model.config import ReplayConfig
from proxy_model.context import ContextBlock
from proxy_model.errors import ReplayError
from proxy_model.loader import LoadedModel
from proxy_model.spans import Encoded

if TYPE_CHECKING:
    from proxy_model.pooling import Pooled
    from proxy_model.replay import Rows


def observe(model: LoadedModel, blocks: Sequence[ContextBlock], config: ReplayConfig, session: int) -> Replay:
    """One replay by itself. Errors as `Replayer.observe`."""
    return Replayer(model, config).observe(blocks, session)


class Replayer:
    """Replays one after the other, with one model. What consecutive contexts of a session share is computed once."""

    def __init__(self, model: LoadedModel, config: ReplayConfig, clock: Callable[[], float] = monotonic) -> None:
        from proxy_model.replay import RowReader

        self._model = model
        self._config = config
        self._clock = clock
        self._reader = RowReader(model.network, model.layers, model.dependency_layer, chunk=config.chunk)

    def observe(self, blocks: Sequence[ContextBlock], session: int) -> Replay:
        """`blocks` is the served context in order; `session` names whose it is.

        Raises ReplayError: a turn without words, no memory, attention that is no number. ModelUnavailable: attention of
        a kind that cannot be read.
        """
        from proxy_model.pooling import pooled, segments_of

        config, began = self._config, self._clock()
        encoded = self._model.encode(blocks)
        plan = sampling.plan(blocks, encoded, rows_max=config.rows_max, block_rows_max=config.block_rows_max)
        if not plan.turn:
            raise ReplayError("the finished turn has no words to read attention from", "nothing is to be done")
        known = sampling.observed(blocks, encoded)
        segments = segments_of(encoded.spans, len(encoded.ids))
        rows = self._reader.read(encoded.ids, plan, segments, len(blocks), session)
        pools = pooled(rows.rho, segments, len(blocks), members=known, quantile=config.clip_quantile)
        return Replay(
            model=self._model.name,
            parameters=self._model.parameters,
            device=self._model.device,
            dtype=self._model.dtype,
            layers=self._model.layers,
            dependency_layer=self._model.dependency_layer,
            tokens=len(encoded.ids),
            tokens_computed=rows.computed,
            rows=len(plan.turn),
            rows_assistant=len(plan.assistant),
            unobserved=tuple(o for i in encoded.unobserved if (o := blocks[i].ordinal) is not None),
            seconds=self._clock() - began,
            blocks=_readings(blocks, encoded, known, pools, self._model.layers),
            edges=_edges(blocks, known, plan, rows),
        )

    def forget(self) -> None:
        """Frees the keys and values that are kept for the next replay."""
        self._reader.forget()


def _readings(
    blocks: Sequence[ContextBlock], encoded: Encoded, known: Sequence[int], pools: "Pooled", layers: Sequence[int]
) -> tuple[BlockReading, ...]:
    (mass, mass_assistant), (density, density_assistant) = pools.mass.tolist(), pools.density.tolist()
    masses, densities = pools.mass_by_layer.tolist(), pools.density_by_layer.tolist()

    def reading(index: int, ordinal: int) -> BlockReading:
        return BlockReading(
            ordinal=ordinal,
            tokens=sum(end - start for start, end in encoded.spans[index]),
            mass=mass[index],
            density=density[index],
            mass_assistant=mass_assistant[index],
            density_assistant=density_assistant[index],
            by_layer=tuple(
                LayerReading(layer, group, masses[at][g][index], densities[at][g][index])
                for at, layer in enumerate(layers)
                for g, group in enumerate(sampling.GROUPS)
            ),
        )

    return tuple(reading(i, o) for i in known if (o := blocks[i].ordinal) is not None)


def _edges(
    blocks: Sequence[ContextBlock], known: Sequence[int], plan: sampling.RowPlan, rows: "Rows"
) -> tuple[tuple[int, int, float], ...]:
    """d(a, b) of Eq. 5 for a before b, where it is worth storing; by dependent, then support."""
    found = []
    for (dependent, _), masses in zip(plan.dependents, rows.edges.tolist(), strict=True):
        for support in known:
            a, b = blocks[support].ordinal, blocks[dependent].ordinal
            if support < dependent and masses[support] > EDGE_MASS_MIN and a is not None and b is not None:
                found.append((a, b, masses[support]))
    return tuple(sorted(found, key=lambda edge: (edge[1], edge[0])))
