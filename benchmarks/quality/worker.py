"""One inference worker of the measurement: jobs in on stdin, a JSON line per result out on stdout."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from kvd_demo.prose import prose
from kvd_demo.sealed_prompt import SealedPrompt
from kvd_demo.smollm2 import load_model, load_tokenizer

import kvd_client
from kvd.policy import H2O
from kvd_client.hf import attach

from .jobs import AFTER, INSIDE, PROSE, Job
from .methods import DENSE, METHODS, PUBLISHED_WINDOW, Budget
from .probing import Outcome, Probe, Prober
from .scoring import answer_probe, exact_match_teacher_forced
from .tasks import TASKS, Haystack, Spot, make_sample

POOL_BLOCKS = 1024  # a 4k prompt's 256 blocks, its copies, and scratch
BLOCK_SIZE = 16  # tokens
CONTINUATION_TOKENS = 64
CALL_TIMEOUT_S = 120.0  # a compression waits for the kernel worker, which others use too
TASKS_BY_NAME = {task.name: task for task in TASKS}


@dataclass(frozen=True)
class Question:
    """A probe, and how many of the last tokens before it are a question that the worker knows."""

    mode: str
    probe: Probe
    known_tokens: int


class Worker:
    """A model, its pool, and prompts made to order."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.model = load_model(torch.float32)
        attach(self.model)
        self.haystack = Haystack(load_tokenizer(), prose())
        self.client = kvd_client.connect(name=name, timeout=CALL_TIMEOUT_S)
        spec = kvd_client.KVSpec.from_hf(self.model.config, dtype="float32", block_size=BLOCK_SIZE)
        self.pool = self.client.pool(name, spec, blocks=POOL_BLOCKS)

    def results(self, job: Job) -> Iterator[dict[str, Any]]:
        """For each mode one for dense, one for each method and keep."""
        prompt, questions, answer = self._prompt(job)
        sealed = SealedPrompt(self.pool, prompt, [each.probe.after for each in questions])
        sealed.read(self.model, lambda tokens: None)
        prober = Prober(self.model, sealed)
        for question in questions:
            probe = question.probe
            dense = prober.dense(probe)
            yield _result(job, question, (DENSE, 1.0), (dense, dense), answer)
            for name, keep, outcome in self._outcomes(job, prober, question):
                yield _result(job, question, (name, keep), (dense, outcome), answer)

    def _outcomes(self, job: Job, prober: Prober, question: Question) -> Iterator[tuple[str, float, Outcome]]:
        keeps = sorted(job.keeps, reverse=True)
        budgets = [Budget(keep, question.probe.after, BLOCK_SIZE, question.known_tokens) for keep in keeps]
        for name in job.methods:
            policies = [METHODS[name](budget) for budget in budgets]
            h2o = [policy for policy in policies if isinstance(policy, H2O)]
            outcomes = (
                prober.observed(h2o, question.probe)
                if h2o
                else (prober.compressed(policy, question.probe) for policy in policies)
            )
            yield from ((name, keep, outcome) for keep, outcome in zip(keeps, outcomes, strict=True))

    def _prompt(self, job: Job) -> tuple[list[int], list[Question], list[int]]:
        """Tokens to prefill, what to ask and where, and the answer's tokens."""
        if job.task == PROSE:
            ids = self._prose_tokens(job)
            prompt, rest = ids[: job.length], ids[job.length :]
            return prompt, [Question(INSIDE, Probe(len(prompt), rest, len(rest)), PUBLISHED_WINDOW)], []
        sample = make_sample(self.haystack, TASKS_BY_NAME[job.task], Spot(job.length, job.depth, job.seed))
        document, asked, answer = sample.document_ids, sample.question_ids, sample.answer_ids
        after = Probe(len(document), answer_probe(sample), len(answer))
        inside = Probe(len(document) + len(asked) - 1, [asked[-1], *answer[:-1]], len(answer))
        questions = [Question(INSIDE, inside, len(asked) - 1), Question(AFTER, after, PUBLISHED_WINDOW)]
        return document + asked[:-1], [each for each in questions if each.mode in job.modes], answer

    def _prose_tokens(self, job: Job) -> list[int]:
        ids: list[int] = self.haystack.tokenizer.encode(prose())
        start = job.seed * (len(ids) - job.length - CONTINUATION_TOKENS) // 10
        return ids[start : start + job.length + CONTINUATION_TOKENS]


def _result(
    job: Job, question: Question, how: tuple[str, float], both: tuple[Outcome, Outcome], answer: list[int]
) -> dict[str, Any]:
    dense, outcome = both
    report = outcome.report
    mass = None if report is None or not report.mass_retained.size else float(report.mass_retained.mean())
    score = (
        {"kl": _divergence(dense.logits, outcome.logits)}
        if job.task == PROSE
        else {"hit": exact_match_teacher_forced(outcome.logits, answer)}
    )
    return {
        "key": job.key,
        "suite": job.suite,
        "task": job.task,
        "length": job.length,
        "mode": question.mode,
        "method": how[0],
        "keep": how[1],
        "tokens_kept": None if report is None else report.tokens_kept,
        "mass_retained": mass,
        **score,
    }


def _divergence(dense: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(dense || other) per token, nats."""
    p, q = dense.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def main() -> None:
    """Serve jobs until stdin ends."""
    worker = Worker(sys.argv[1])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = Job.from_dict(json.loads(line))
        print(json.dumps({"done": job.key, "results": list(worker.results(job))}), flush=True)
    worker.client.close()


if __name__ == "__main__":
    main()
