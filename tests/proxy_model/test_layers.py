"""The depth rule against the stacks of known models."""

import pytest

from proxy_model.layers import Choice, by_depth, chosen

FULL, WINDOW = "full_attention", "sliding_attention"
GEMMA3_270M = [FULL if i % 6 == 5 else WINDOW for i in range(18)]


def test_qwen3_0_6b_is_read_where_the_paper_reads_it() -> None:
    assert by_depth([FULL] * 28) == Choice((9, 14, 19, 23), 14)


def test_smollm2_135m() -> None:
    assert by_depth([FULL] * 30) == Choice((10, 15, 20, 25), 15)


def test_a_layer_with_a_window_is_never_read() -> None:
    assert by_depth(GEMMA3_270M) == Choice((5, 11, 17), 11)


@pytest.mark.parametrize("depth", range(1, 65))
def test_every_stack_has_layers(depth: int) -> None:
    choice = by_depth([FULL] * depth)
    assert choice.dependency_layer in choice.layers
    assert all(0 <= layer < depth for layer in choice.layers) and list(choice.layers) == sorted(set(choice.layers))


def test_two_layers_as_near_give_the_lower() -> None:
    """Half of 12 is 6; 5 and 7 are as near."""
    kinds = [FULL if layer in (5, 7) else WINDOW for layer in range(12)]
    assert by_depth(kinds).dependency_layer == 5


def test_a_stack_without_full_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer of full attention"):
        by_depth([WINDOW] * 8)


def test_layers_may_be_chosen() -> None:
    assert chosen((11, 5, 11), GEMMA3_270M) == Choice((5, 11), 11)
    assert chosen((5,), GEMMA3_270M) == Choice((5,), 5)


@pytest.mark.parametrize("layer", [-1, 6, 18])
def test_a_chosen_layer_must_be_one_of_full_attention(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer {layer} is none of full attention; those are 5, 11, 17"):
        chosen((5, layer), GEMMA3_270M)
