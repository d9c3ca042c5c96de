"""The same random traffic by clients of legacy completions, which go on with what was said before."""

from __future__ import annotations

from typing import Any

import orjson

from millrace.dialects.completions.dialect import Completions
from tests.fuzz.gateway_fuzz import TEXTS, Traffic
from tests.support.in_process import Answer

PATH = Completions.path
UNSERVED: dict[str, Any] = {"echo": True, "suffix": "x", "best_of": 2.0}
"""what is refused, since it would change nothing"""


class CompletionsTraffic(Traffic):
    """Half of its calls are completions."""

    def _asked(self) -> tuple[str, Any, str]:
        kind = self.random.random()
        if kind < 0.5:
            return PATH, self._completion(), "POST"
        if kind < 0.52:
            return PATH, {}, self.random.choice(("GET", "PUT", "FOO"))
        return super()._asked()

    def _completion(self) -> dict[str, Any]:
        r = self.random
        prompts: tuple[Any, ...] = (r.choice(TEXTS), [5, 6, 7], [[5, 6]], ["hi"], ["hi", "you"], [5, "x"])
        given: dict[str, Any] = {"model": "m", "prompt": r.choice(prompts)}
        if self.completed and r.random() < 0.5:
            given["prompt"] = r.choice(self.completed) + r.choice(TEXTS)
        if r.random() < 0.3:
            given["stream"] = True
        options: dict[str, Any] = {
            "max_tokens": r.choice((5, 1000)), "temperature": 1.0, "top_p": 1.0, "top_k": 0, "n": r.choice((1, 2)),
            "seed": 7, "stop": ["zz"], "logprobs": 1, "user": "ann", "stream_options": {"include_usage": True},
            "logit_bias": {"5": 1.0}, "frequency_penalty": 0.5,
        }  # fmt: skip
        for name in r.sample(list(options), r.randrange(4)):
            given[name] = options[name]
        if r.random() < 0.15:
            name = r.choice(list(UNSERVED))
            given[name] = UNSERVED[name]
        return given

    @property
    def completed(self) -> list[str]:
        """Prompts with what came after them."""
        self._completed: list[str] = getattr(self, "_completed", [])
        return self._completed

    def _learn(self, path: str, given: Any, answer: Answer) -> None:
        if path != PATH:
            return super()._learn(path, given, answer)
        if answer.status == 200 and answer.body.startswith(b"{") and isinstance(given.get("prompt"), str):
            said = orjson.loads(answer.body)["choices"][0]["text"]
            self._completed = [*self.completed[-20:], (given["prompt"] + said)[:2000]]
        return None
