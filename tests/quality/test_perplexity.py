import math

import pytest
import torch
from bounded_cache import rotated, sinks_and_window
from kvd_demo.forward import advance
from quality.perplexity import perplexity
from transformers import DynamicCache

TEXT = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1)).tolist()


def in_one_pass(model, mask=None):
    """Log loss of each token of TEXT but the first, [149]; mask [150, 150], True where attention may look."""
    added = None if mask is None else torch.where(mask, 0.0, -math.inf)[None, None]
    with torch.inference_mode():
        logits = model(torch.tensor([TEXT]), attention_mask=added, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(TEXT[1:]), reduction="none")


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_dense_perplexity_is_that_of_one_pass_for_any_chunk(tiny_model, chunk):
    got = perplexity(tiny_model, DynamicCache(), TEXT, chunk=chunk)
    assert got.token_count == 149
    assert got.value == pytest.approx(math.exp(in_one_pass(tiny_model).mean()), rel=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_skipped_tokens_are_left_out_of_the_score(tiny_model, chunk):
    got = perplexity(tiny_model, DynamicCache(), TEXT, skip=100, chunk=chunk)
    assert got.token_count == 50
    assert got.value == pytest.approx(math.exp(in_one_pass(tiny_model)[99:].mean()), rel=1e-4)


@pytest.mark.parametrize("sinks", [0, 4])
def test_the_bounded_reference_is_dense_attention_behind_a_mask(tiny_model, sinks):
    query, key = torch.arange(150)[:, None], torch.arange(150)[None, :]
    mask = (key <= query) & ((key < sinks) | (query - key < 20))
    got = perplexity(tiny_model, sinks_and_window(tiny_model, sinks, 20), TEXT, chunk=1)
    assert got.value == pytest.approx(math.exp(in_one_pass(tiny_model, mask).mean()), rel=1e-4)


@pytest.mark.parametrize("cache_positions", [False, True])
def test_a_bound_that_is_never_reached_changes_nothing(tiny_model, cache_positions):
    cache = sinks_and_window(tiny_model, 4, 146, cache_positions=cache_positions)
    assert perplexity(tiny_model, cache, TEXT).value == perplexity(tiny_model, DynamicCache(), TEXT).value


def test_cache_positions_matter_once_tokens_were_dropped(tiny_model):
    original = perplexity(tiny_model, sinks_and_window(tiny_model, 4, 20), TEXT)
    renumbered = perplexity(tiny_model, sinks_and_window(tiny_model, 4, 20, cache_positions=True), TEXT)
    assert original.value != renumbered.value


def test_a_bounded_cache_tells_the_true_length_and_keeps_no_more_than_its_bound(tiny_model):
    cache = sinks_and_window(tiny_model, 4, 20)
    for start in range(0, 150, 10):
        advance(tiny_model, cache, TEXT[start : start + 10])
    assert cache.get_seq_length() == 150
    assert all(layer.keys.shape[-2] == 24 for layer in cache.layers)


@pytest.mark.parametrize("moved_by", [1, 1000, 100_000])
def test_a_key_moved_forward_is_the_key_of_the_later_position(tiny_model, moved_by):
    inv_freq = tiny_model.model.rotary_emb.inv_freq
    key = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2))
    at_five, later = rotated(key, 5, inv_freq), rotated(key, 5 + moved_by, inv_freq)
    torch.testing.assert_close(rotated(at_five, moved_by, inv_freq), later, rtol=1e-4, atol=1e-4)
