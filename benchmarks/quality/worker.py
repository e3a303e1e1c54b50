"""One inference worker of the measurement: jobs in on stdin, a JSON line per result out on stdout."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from kvd_demo.prose import prose
from kvd_demo.smollm2 import load_model, load_tokenizer

import kvd_client
from kvd_client.hf import attach

from .jobs import AFTER, PROSE, Job
from .methods import DENSE, H2O_METHOD, METHODS, Budget
from .probing import Outcome, Probe, PromptInPool, observed
from .scoring import exact_match_teacher_forced
from .tasks import TASKS, Haystack, Spot, make_sample

POOL_BLOCKS = 1024  # a 4k prompt's 256 blocks, its copies, and scratch
BLOCK_SIZE = 16  # tokens
CONTINUATION_TOKENS = 64
TASKS_BY_NAME = {task.name: task for task in TASKS}


class Worker:
    """A model, its pool, and prompts made to order."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self.model = load_model(torch.float32)
        attach(self.model)
        self.haystack = Haystack(load_tokenizer(), prose())
        self.client = kvd_client.connect(name=name)
        spec = kvd_client.KVSpec.from_hf(self.model.config, dtype="float32", block_size=BLOCK_SIZE)
        self.pool = self.client.pool(name, spec, blocks=POOL_BLOCKS)

    def results(self, job: Job) -> Iterator[dict[str, Any]]:
        """One for dense, one for each method and keep."""
        prompt, probe, answer, question_tokens = self._prompt(job)
        in_pool = PromptInPool(self.model, self.pool, prompt)
        dense = in_pool.dense(probe)
        yield self._result(job, (DENSE, 1.0), dense, dense, answer)
        for name in (name for name in job.methods if name != H2O_METHOD):
            for keep in job.keeps:
                policy = METHODS[name](Budget(keep, len(prompt), BLOCK_SIZE, question_tokens))
                yield self._result(job, (name, keep), in_pool.compressed(policy, probe), dense, answer)
        if H2O_METHOD in job.methods:
            keeps = sorted(job.keeps, reverse=True)
            budgets = [Budget(keep, len(prompt), BLOCK_SIZE, question_tokens) for keep in keeps]
            policies = [METHODS[H2O_METHOD](budget) for budget in budgets]
            outcomes = observed(self.model, self.pool, prompt, policies, probe)
            for keep, outcome in zip(keeps, outcomes, strict=True):
                yield self._result(job, (H2O_METHOD, keep), outcome, dense, answer)

    def _prompt(self, job: Job) -> tuple[list[int], Probe, list[int], int]:
        """Tokens to prefill and compress, the probe after them, the answer, the question's known tokens."""
        if job.task == PROSE:
            ids = self._prose_tokens(job)
            prompt, rest = ids[: job.length], ids[job.length :]
            return prompt, Probe(rest, len(rest)), [], 32
        sample = make_sample(self.haystack, TASKS_BY_NAME[job.task], Spot(job.length, job.depth, job.seed))
        if job.mode == AFTER:
            fed = [*sample.question_ids, *sample.answer_ids[:-1]]
            return sample.document_ids, Probe(fed, len(sample.answer_ids)), sample.answer_ids, 32
        whole = sample.document_ids + sample.question_ids
        fed = [whole[-1], *sample.answer_ids[:-1]]
        return whole[:-1], Probe(fed, len(sample.answer_ids)), sample.answer_ids, len(sample.question_ids) - 1

    def _prose_tokens(self, job: Job) -> list[int]:
        ids: list[int] = self.haystack.tokenizer.encode(prose())
        start = job.seed * (len(ids) - job.length - CONTINUATION_TOKENS) // 10
        return ids[start : start + job.length + CONTINUATION_TOKENS]

    def _result(
        self, job: Job, how: tuple[str, float], outcome: Outcome, dense: Outcome, answer: list[int]
    ) -> dict[str, Any]:
        report = outcome.report
        mass = [] if report is None else report.mass_retained
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
            "mode": job.mode,
            "method": how[0],
            "keep": how[1],
            "tokens_kept": None if report is None else report.tokens_kept,
            "mass_retained": float(mass.mean()) if len(mass) else None,
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
        fields = json.loads(line)
        job = Job(**{**fields, "keeps": tuple(fields["keeps"]), "methods": tuple(fields["methods"])})
        print(json.dumps({"done": job.key, "results": list(worker.results(job))}), flush=True)
    worker.client.close()


if __name__ == "__main__":
    main()
