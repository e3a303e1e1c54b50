import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quality.tasks import CITIES, TASKS, WORDS, Haystack, Spot, make_sample

LONGEST_SENTENCE_TOKENS = 90


@pytest.fixture(scope="module")
def haystack(byte_tokenizer):
    nouns = itertools.cycle(["river", "stone", "letter", "garden", "window", "teacher", "market"])
    verbs = itertools.cycle(["crosses", "follows", "forgets", "repairs", "watches"])
    sentences = [
        f"The {next(nouns)} {next(verbs)} the {next(nouns)} of {year}." for year in range(1500, 2100)
    ]
    paragraphs = [" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6)]
    return Haystack(byte_tokenizer, "\n\n".join(paragraphs))


every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


@every_task
def test_the_same_spot_gives_the_same_sample(haystack, task):
    assert make_sample(haystack, task, Spot(1500, 0.5, 7)) == make_sample(haystack, task, Spot(1500, 0.5, 7))


@every_task
def test_another_seed_gives_another_document_and_answer(haystack, task):
    samples = [make_sample(haystack, task, Spot(1500, 0.5, seed)) for seed in range(8)]
    assert len({sample.document for sample in samples}) == 8
    assert len({sample.answer for sample in samples}) > 1


@every_task
@settings(max_examples=25, deadline=None)
@given(target=st.integers(1000, 5000), depth=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_a_prompt_is_as_long_as_asked_and_holds_its_answer_once_at_its_depth(
    haystack, task, target, depth, seed
):
    sample = make_sample(haystack, task, Spot(target, depth, seed))
    length = len(sample.document_ids) + len(sample.question_ids)
    assert target - LONGEST_SENTENCE_TOKENS < length <= target
    assert sample.document.count(sample.answer) == 1
    found = sample.document.index(sample.answer) / len(sample.document)
    assert abs(found - depth) < 0.25 * (1 + task.distractor_count) * 1000 / target


@every_task
def test_the_two_parts_are_the_whole_prompt(haystack, task, byte_tokenizer):
    sample = make_sample(haystack, task, Spot(1500, 0.3, 1))
    prompt = byte_tokenizer.decode(sample.document_ids + sample.question_ids)
    assert prompt.startswith(f"<|user|>{sample.document}\n\n{sample.question}<|assistant|>")
    assert sample.document.find(prompt.split("<|assistant|>")[1] + sample.answer) >= 0
    assert byte_tokenizer.decode(sample.answer_ids) == sample.answer


@pytest.mark.parametrize("task", [t for t in TASKS if t.distractor_count], ids=lambda task: task.name)
def test_distractors_name_other_cities_and_other_numbers(haystack, task):
    for seed in range(10):
        sample = make_sample(haystack, task, Spot(1500, 0.5, seed))
        facts = re.findall(r"number for (\w+) is (\d{5})\.", sample.document)
        cities, numbers = zip(*facts, strict=True)
        assert len(set(cities)) == len(set(numbers)) == 1 + task.distractor_count
        asked = cities.index(next(city for city in cities if city in sample.question))
        assert numbers[asked] == sample.answer


def test_a_prompt_without_room_for_prose_is_refused(haystack):
    with pytest.raises(ValueError, match="ask for more"):
        make_sample(haystack, TASKS[0], Spot(60, 0.5, 0))


def test_an_answer_that_the_prose_holds_is_not_used(byte_tokenizer):
    prose = " ".join(f"Here stands the {word}." for word in WORDS[1:])
    word_task = next(task for task in TASKS if task.answers_are_words)
    assert make_sample(Haystack(byte_tokenizer, prose), word_task, Spot(700, 0.5, 0)).answer == WORDS[0]


def test_keys_and_words_are_distinct():
    assert len(set(CITIES)) == len(CITIES)
    assert len(set(WORDS)) == len(WORDS)
