"""A server as lm-evaluation-harness sees it: its completions API with sparse decode chosen per request."""

from __future__ import annotations

import statistics
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


class PromptTooLong(ValueError):
    """The harness would have cut a prompt, which makes it another task."""


class Served(LocalCompletionsAPI):
    """Completions from token ids, templated here, so that the prompt is known to the last token.

    Args:
        url: of the server.
        model: folder or name of model and tokenizer.
        max_length: tokens that a request may have, answer included.
        choice: ``custom_params["locks"]`` of every request; None sends none.
        concurrent: requests at a time.
        begin_of_text: put the tokenizer's special tokens before a prompt.
        think_end: text that ends a reasoning trace; an answer is what follows its last occurrence.
    """

    def __init__(
        self,
        url: str,
        model: str,
        max_length: int,
        choice: dict[str, Any] | None,
        concurrent: int,
        think_end: str | None = None,
        begin_of_text: bool = False,
    ) -> None:
        super().__init__(
            base_url=f"{url}/v1/completions",
            model=model,
            tokenizer_backend="huggingface",
            max_length=max_length + 1,
            num_concurrent=max(concurrent, 2),  # the harness's other path retries without an event loop
            timeout=24 * 3600,
            add_bos_token=begin_of_text,
        )
        self.choice, self.think_end = choice, think_end
        self.finish_reasons: list[str] = []
        self.prompt_tokens: list[int] = []

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        longest = max(
            len(self.tok_encode(request.args[0], add_special_tokens=self.add_bos_token))
            + request.args[1].get("max_gen_toks", self._max_gen_toks)
            for request in requests
        )
        if longest > self.max_length:
            raise PromptTooLong(
                f"a prompt needs {longest} tokens with its answer; room is {self.max_length}"
            )
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _create_payload(self, messages: Any, **arguments: Any) -> dict[str, Any]:
        payload = super()._create_payload(messages, **arguments)
        return payload if self.choice is None else {**payload, "custom_params": {"locks": self.choice}}

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:  # type: ignore[override]
        """Answers, noting how each ended."""
        answers = []
        for output in outputs if isinstance(outputs, list) else [outputs]:
            self.prompt_tokens.append(output["usage"]["prompt_tokens"])
            for choice in sorted(output["choices"], key=lambda choice: choice["index"]):
                self.finish_reasons.append(choice["finish_reason"])
                text = choice["text"]
                answers.append(text.rsplit(self.think_end, 1)[-1] if self.think_end else text)
        return answers

    def account(self) -> dict[str, Any]:
        """What a score cannot be read without: answers cut at their limit, lengths of the prompts."""
        cut = self.finish_reasons.count("length") / len(self.finish_reasons)
        return {
            "cut_share": round(cut, 4),
            "prompt_tokens": round(statistics.mean(self.prompt_tokens), 1),
            "prompt_tokens_max": max(self.prompt_tokens),
        }
