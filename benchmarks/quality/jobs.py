"""The measurements as a list of jobs, ordered so that a run may stop anywhere."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .methods import KEEPS, METHODS
from .tasks import NUMBER, NUMBER_AMONG_FIVE, PASSKEY, TASKS, WORD

LENGTHS = (1024, 2048, 4096)  # tokens
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the document
ROUNDS = {1024: 5, 2048: 4, 4096: 2}  # of 5 depths: 55 samples a task, a 95 % interval is about 0.2 wide
SPAN_SAMPLES = 300  # without a loss they bound it below 1 % (rule of three)
PROSE_SAMPLES = 10
SPAN_METHODS = ("SnapKV max 21 (tuned)", "Span", "Span by block")
SPAN_TASKS = (NUMBER.name, PASSKEY.name, NUMBER_AMONG_FIVE.name, WORD.name)
AGNOSTIC_METHODS = ("StreamingLLM", "SnapKV max 21 (tuned)", "Span", "KeyDiff", "Expected Attention")
AGNOSTIC_ROUNDS = 4  # of 5 depths and two tasks: 40 samples
AGNOSTIC_KEEPS = (0.25, 0.5)
INSIDE, AFTER = "question inside", "question after"
PROSE = "prose"


@dataclass(frozen=True)
class Job:
    """One prompt and what to try on it. Equal jobs give equal results."""

    suite: str
    task: str
    length: int
    depth: float
    seed: int
    modes: tuple[str, ...] = (INSIDE,)
    keeps: tuple[float, ...] = KEEPS
    methods: tuple[str, ...] = tuple(METHODS)

    @property
    def key(self) -> str:
        """Finds a job that was done before."""
        return f"{self.suite}/{self.task}/{self.length}/{self.depth}/{self.seed}/{self.modes[0]}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Job":
        """From JSON, which knows lists only."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**given)


def span_jobs() -> Iterator[Job]:
    """Span at 0.16 beside tuned SnapKV, on enough samples to bound what it loses."""
    for number in range(SPAN_SAMPLES):
        task = SPAN_TASKS[number % len(SPAN_TASKS)]
        depth = DEPTHS[number // len(SPAN_TASKS) % len(DEPTHS)]
        yield Job("span", task, LENGTHS[0], depth, 1000 + number, keeps=(0.16,), methods=SPAN_METHODS)


def grid_jobs() -> Iterator[Job]:
    """Every task, length and depth, both modes from one prefill; a round adds one seed to each.

    The longest prompts cost ten times the shortest (H2O observes N x N), so they have the fewest rounds.
    """
    rounds = [(seed, length) for length in LENGTHS for seed in range(ROUNDS[length])]
    for seed, length in sorted(rounds, key=lambda one: (one[0] + 1) / ROUNDS[one[1]]):
        for depth in DEPTHS:
            for task in TASKS:
                yield Job("grid", task.name, length, depth, seed, (INSIDE, AFTER))


def agnostic_jobs() -> Iterator[Job]:
    """Questions that nobody knew when the document was compressed, at shares where something can be left."""
    for seed in range(2000, 2000 + AGNOSTIC_ROUNDS):
        for depth in DEPTHS:
            for task in (NUMBER.name, PASSKEY.name):
                spot = ("agnostic", task, LENGTHS[0], depth, seed, (AFTER,))
                yield Job(*spot, keeps=AGNOSTIC_KEEPS, methods=AGNOSTIC_METHODS)


def prose_jobs() -> Iterator[Job]:
    """Plain continuation: how far the next tokens' distributions move from dense."""
    for seed in range(PROSE_SAMPLES):
        yield Job("prose", PROSE, LENGTHS[1], 1.0, seed, keeps=(0.16,))


SUITES = {"span": span_jobs, "grid": grid_jobs, "prose": prose_jobs, "agnostic": agnostic_jobs}
