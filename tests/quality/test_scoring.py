import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvd_demo.forward import advance
from quality.scoring import Share, answer_probe, exact_match_teacher_forced
from quality.tasks import Sample
from transformers import DynamicCache

tokens = st.lists(st.integers(0, 255), min_size=1, max_size=12)


def greedy(model, prompt, count):
    cache, fed, answer = DynamicCache(), prompt, []
    for _ in range(count):
        answer.append(int(advance(model, cache, fed)[0].argmax()))
        fed = answer[-1:]
    return answer


def decided_in_one_pass(model, document, question, answer):
    sample = Sample("any", "", "", "", document, question, answer)
    cache = DynamicCache()
    advance(model, cache, document)
    return exact_match_teacher_forced(advance(model, cache, answer_probe(sample), len(answer)), answer)


@settings(max_examples=40, deadline=None)
@given(document=tokens, question=tokens, count=st.integers(1, 6), data=st.data())
def test_one_pass_decides_as_greedy_decoding_does(tiny_model, document, question, count, data):
    said = greedy(tiny_model, document + question, count)
    assert decided_in_one_pass(tiny_model, document, question, said)
    expected = list(said)
    expected[data.draw(st.integers(0, count - 1))] = data.draw(st.integers(0, 255))
    assert decided_in_one_pass(tiny_model, document, question, expected) == (expected == said)


def test_rows_that_do_not_fit_the_answer_are_refused():
    with pytest.raises(ValueError, match="one row each"):
        exact_match_teacher_forced(torch.zeros(3, 8), [1, 2])


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_those_of_newcombe_1998(hits, trials, low, high):
    assert Share(hits, trials).interval == pytest.approx((low, high), abs=5e-5)


def test_a_share_without_a_loss_reaches_one():
    assert Share(300, 300).interval == pytest.approx((0.98736, 1.0), abs=5e-5)
    assert str(Share(300, 300)) == "1.00 [0.99, 1.00] (300/300)"
