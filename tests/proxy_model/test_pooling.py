"""Sums and clipped means per block, by hand."""

import pytest

torch = pytest.importorskip("torch")

from proxy_model.pooling import clipped, pooled, segments_of, sums  # noqa: E402  # they need torch

SPANS = (((0, 2),), ((3, 5), (6, 8)), ((8, 8),), ((9, 12),))
SEGMENTS = [0, 0, 4, 1, 1, 4, 1, 1, 4, 3, 3, 3]


def test_a_token_belongs_to_its_block_and_the_templates_to_none() -> None:
    assert segments_of(SPANS, 12).tolist() == SEGMENTS
    assert segments_of((), 3).tolist() == [0, 0, 0]


def test_sums_leave_out_what_belongs_to_no_block() -> None:
    values = torch.arange(24, dtype=torch.float64).reshape(2, 12)
    assert sums(values, torch.tensor(SEGMENTS), 4).tolist() == [[1, 20, 0, 30], [25, 68, 0, 66]]


def test_the_quantile_is_taken_over_the_known_tokens_alone() -> None:
    rho = torch.tensor([[100.0, 4.0, 3.0, 1.0], [100.0, 1.0, 1.0, 2.0]])
    known = torch.tensor([False, True, True, True])
    assert clipped(rho, known, 0.5).tolist() == [[3, 3, 3, 1], [1, 1, 1, 1]]
    assert clipped(rho, known, 0.75).tolist() == [[3.5, 3.5, 3, 1], [1.5, 1, 1, 1.5]]  # between two values: linear
    assert clipped(rho, torch.zeros(4, dtype=torch.bool), 0.5) is rho


def test_density_is_clipped_per_token_and_mass_is_not() -> None:
    rho = torch.zeros(2, 1, 12)
    rho[0, 0] = torch.tensor([0.4, 0.02, 0.1, 0.01, 0.03, 0, 0.02, 0.02, 0, 0.1, 0.1, 0.2])
    rho[1, 0] = torch.tensor([0.0, 0.20, 0.3, 0.05, 0.05, 0, 0.05, 0.05, 0, 0.1, 0.1, 0.1])
    found = pooled(rho, torch.tensor(SEGMENTS), 4, members=(1, 3), quantile=1.0)
    assert found.mass_by_layer.tolist() == [[pytest.approx([0.42, 0.08, 0, 0.4])], [pytest.approx([0.2, 0.2, 0, 0.3])]]
    assert found.mass.tolist() == [pytest.approx([0.31, 0.14, 0, 0.35])]
    # Tokens of blocks 1 and 3 end at 0.2 and 0.1: block 0, no member, is held to that as well.
    assert found.density_by_layer.tolist() == [
        [pytest.approx([(0.2 + 0.02) / 2, 0.02, 0, 0.4 / 3])],
        [pytest.approx([0.1 / 2, 0.05, 0, 0.1])],
    ]
    # The mean over the layers comes first, then the clip: at (0.2 + 0.1) / 2.
    assert found.density.tolist() == [pytest.approx([(0.15 + 0.11) / 2, 0.035, 0, 0.35 / 3])]


def test_a_sink_does_not_make_its_block_important() -> None:
    """One token of a thousand takes half of all attention: of its block's density no more is left than of others'."""
    rho = torch.full((1, 1, 1000), 0.5 / 999)
    rho[0, 0, 0] = 0.5
    spans = (((0, 500),), ((500, 1000),))
    found = pooled(rho, segments_of(spans, 1000), 2, members=(0, 1), quantile=0.999)
    first, second = found.density[0].tolist()
    assert found.mass[0, 0] > 0.7
    assert first < 1.01 * second + 0.001
    unclipped = pooled(rho, segments_of(spans, 1000), 2, members=(0, 1), quantile=1.0)
    assert unclipped.density[0, 0] > 2 * unclipped.density[0, 1]


def test_without_members_nothing_is_clipped_and_nothing_fails() -> None:
    rho = torch.full((1, 2, 12), 1 / 12)
    found = pooled(rho, torch.tensor(SEGMENTS), 4, members=(), quantile=0.999)
    assert found.density.tolist() == [pytest.approx([1 / 12, 1 / 12, 0, 1 / 12])] * 2
