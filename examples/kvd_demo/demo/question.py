"""What the reader asks about its document, and whoever goes on with it elsewhere."""

from typing import Any

import torch
from quality.tasks import NUMBER_AMONG_FIVE, Haystack, Sample, Spot, make_sample

import kvd_client
from kvd_client.hf import KvdCache, attach
from kvd_demo.demo.pool import PROMPT_TOKENS
from kvd_demo.prose import prose
from kvd_demo.smollm2 import load_model, load_tokenizer

SPOT = Spot(PROMPT_TOKENS, depth=0.4, seed=3)  # one that the model answers with all tokens in view


class Question:
    """A model that can be asked, and the one question."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.model: Any = load_model(torch.float32)
        attach(self.model)
        self._tokenizer = load_tokenizer()
        self.sample: Sample = make_sample(Haystack(self._tokenizer, prose()), NUMBER_AMONG_FIVE, SPOT)
        self.ids = self.sample.document_ids + self.sample.question_ids

    def ask(self, lease: kvd_client.Lease) -> str:
        """The answer from a lease that holds all tokens but the last, or what was kept of them."""
        prompt = torch.tensor([self.ids])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=KvdCache(lease),
            max_new_tokens=len(self.sample.answer_ids),
            do_sample=False,
        )
        return str(self._tokenizer.decode(output[0, len(self.ids) :])).strip()
