"""Retrieval from long real prose: a fact hidden at a known depth, a question, one right answer.

A sample's prompt comes in two parts, so that a cache can be compressed before the question is known
(document part, compress, question part) or with the question in the window (both parts, compress, answer).
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'A-Z(])")
ANSWER_DIGITS = 5
NUMBERS_DRAWN = 40  # to choose answers from; more than the prose can rule out
DEPTH_OF_FIRST, DEPTH_OF_LAST = 0.05, 0.95  # of the document; where distractors may stand

CITIES = ("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Athens", "Lisbon", "Dublin", "Warsaw")
WORDS = ("walnut", "tiger", "lemon", "hammer", "banana", "bamboo", "copper", "falcon", "guitar", "helmet")


@dataclass(frozen=True)
class Task:
    """One kind of fact. `fact`, `question` and `lead_in` are texts with {key} and, in `fact`, {answer}.

    lead_in opens the assistant's turn up to the answer's first character: a small model then answers
    at once, where it would otherwise begin with a quote or an article and count as wrong.
    """

    name: str
    fact: str
    question: str
    lead_in: str
    answers_are_words: bool = False
    distractor_count: int = 0


def _number_for_city(name: str, distractor_count: int) -> Task:
    return Task(
        name=name,
        fact="The special number for {key} is {answer}.",
        question="What is the special number for {key} mentioned in the text above?",
        lead_in="The special number for {key} is ",
        distractor_count=distractor_count,
    )


PASSKEY = Task(
    name="passkey",
    fact="The pass key is {answer}. Remember it.",
    question="What is the pass key mentioned in the text above?",
    lead_in="The pass key is ",
)
NUMBER = _number_for_city("number", distractor_count=0)
NUMBER_AMONG_TWO = _number_for_city("number-among-two", distractor_count=1)
NUMBER_AMONG_FIVE = _number_for_city("number-among-five", distractor_count=4)
WORD = Task(
    name="word",
    fact='The special word for {key} is "{answer}".',
    question="What is the special word for {key} mentioned in the text above?",
    lead_in='The special word for {key} is "',
    answers_are_words=True,
)
TASKS = (PASSKEY, NUMBER, NUMBER_AMONG_TWO, NUMBER_AMONG_FIVE, WORD)


@dataclass(frozen=True)
class Sample:
    """One prompt and its answer. `document_ids + question_ids` is the whole prompt.

    document_ids  chat opening and document
    question_ids  question, end of the user's turn and the assistant's lead-in
    answer_ids    what greedy decoding must produce next
    """

    task: str
    document: str
    question: str
    answer: str
    document_ids: list[int]
    question_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Spot:
    """Which sample to make: its prompt's length in tokens, the fact's depth from 0 to 1, and a seed."""

    target_tokens: int
    depth: float
    seed: int


class Haystack:
    """Prose cut into sentences and counted once; gives stretches of it in a wanted number of tokens."""

    def __init__(self, tokenizer: Any, prose: str) -> None:
        self.tokenizer, self.prose = tokenizer, prose
        self._sentences = [s for line in prose.split("\n\n") for s in SENTENCE_END.split(line)]
        encoded = tokenizer([f" {sentence}" for sentence in self._sentences])["input_ids"]
        self._token_counts = [len(ids) for ids in encoded]

    def stretch(self, token_count: int, rng: random.Random) -> list[str]:
        """Consecutive sentences from a random place on (round the end), of at most `token_count` tokens."""
        at = rng.randrange(len(self._sentences))
        taken: list[str] = []
        while (token_count := token_count - self._token_counts[at]) >= 0:
            taken.append(self._sentences[at])
            at = (at + 1) % len(self._sentences)
        return taken


def make_sample(haystack: Haystack, task: Task, spot: Spot) -> Sample:
    """The sample of `task` at `spot`; the same for the same arguments.

    The prompt is at most `spot.target_tokens` long and shorter by less than the next sentence.
    Raises ValueError when not even one sentence fits.
    """
    rng = random.Random(f"{task.name}/{spot.target_tokens}/{spot.depth}/{spot.seed}")
    keys = rng.sample(CITIES, 1 + task.distractor_count)
    answers = _draw_answers(task, haystack, rng, len(keys))
    facts = [task.fact.format(key=key, answer=answer) for key, answer in zip(keys, answers, strict=True)]
    empty = _tokenized(haystack.tokenizer, task, keys[0], answers[0], " ".join(facts))
    room = spot.target_tokens - len(empty.document_ids) - len(empty.question_ids)
    sentences = haystack.stretch(room, rng)
    if not sentences:
        raise ValueError(f"{spot.target_tokens} tokens leave no room for prose; ask for more")
    depths = [spot.depth, *(rng.uniform(DEPTH_OF_FIRST, DEPTH_OF_LAST) for _ in facts[1:])]
    document = " ".join(_hidden(facts, depths, sentences))
    return _tokenized(haystack.tokenizer, task, keys[0], answers[0], document)


def _draw_answers(task: Task, haystack: Haystack, rng: random.Random, count: int) -> list[str]:
    """Distinct answers that the prose does not hold by itself, so each stands in the document once."""
    numbers = rng.sample(range(10 ** (ANSWER_DIGITS - 1), 10**ANSWER_DIGITS), NUMBERS_DRAWN)
    candidates = WORDS if task.answers_are_words else map(str, numbers)
    return rng.sample([answer for answer in candidates if answer not in haystack.prose], count)


def _hidden(facts: Sequence[str], depths: Sequence[float], sentences: Sequence[str]) -> list[str]:
    """The sentences with each fact put before the one that starts at its depth (in characters)."""
    length = sum(map(len, sentences))
    waiting = sorted(zip(depths, facts, strict=True))
    result: list[str] = []
    passed = 0
    for sentence in sentences:
        while waiting and waiting[0][0] * length <= passed:
            result.append(waiting.pop(0)[1])
        result.append(sentence)
        passed += len(sentence)
    return result + [fact for _, fact in waiting]


def _tokenized(tokenizer: Any, task: Task, key: str, answer: str, document: str) -> Sample:
    question = task.question.format(key=key)
    prompt: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{document}\n\n{question}"}], tokenize=False, add_generation_prompt=True
    )
    split = prompt.index(document) + len(document)
    return Sample(
        task=task.name,
        document=document,
        question=question,
        answer=answer,
        document_ids=tokenizer.encode(prompt[:split]),
        question_ids=tokenizer.encode(prompt[split:] + task.lead_in.format(key=key)),
        answer_ids=tokenizer.encode(answer),
    )
