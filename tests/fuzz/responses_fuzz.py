"""The same random traffic by clients of OpenAI's Responses, which go on whole, by the last response or by items' ids,
their own and others', mixed with chat completions in the same sessions."""

from __future__ import annotations

from typing import Any

import orjson

from millrace.dialects.responses.dialect import Responses
from tests.fuzz.gateway_fuzz import NAMES, TEXTS, Traffic
from tests.support.in_process import Answer

PATH = Responses.path
UNSERVED: dict[str, Any] = {
    "conversation": "c",
    "background": True,
    "truncation": "auto",
    "prompt": {"id": "p"},
    "top_logprobs": 2.0,
}
"""what is refused, since it would change nothing"""


class ResponsesTraffic(Traffic):
    """Half of its calls are responses."""

    def _asked(self) -> tuple[str, Any, str]:
        r = self.random
        kind = r.random()
        if kind < 0.5:
            return PATH, self._response(), "POST"
        if kind < 0.55:
            id = r.choice(("resp_none", "x" * 2000, "\x00", r.choice(self.responses)))
            return f"{PATH}/{id}", {}, r.choice(("GET", "GET", "GET", "DELETE", "POST"))
        if kind < 0.57:
            return PATH, {}, r.choice(("GET", "PUT", "FOO"))
        return super()._asked()

    def _response(self) -> dict[str, Any]:
        r = self.random
        text = {"type": "input_text", "text": r.choice(TEXTS)}
        content: Any = r.choice((text["text"], [text], [text, text]))
        items: list[Any] = [{"role": r.choice(("user", "user", "developer")), "content": content}]
        given: dict[str, Any] = {"model": "m", "input": r.choice((items, items, text["text"] or "hi"))}
        if self.responded and r.random() < 0.7:
            asked, output, id = r.choice(self.responded)
            tail = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": r.choice(("7", [text]))}
                for item in output
                if item["type"] == "function_call"
            ]
            named = [{"type": "item_reference", "id": item["id"]} for item in output]
            how = r.random()
            if how < 0.5:
                given |= {"input": [*tail, *items], "previous_response_id": id}
            elif how < 0.7:
                given["input"] = [*asked, *named, *tail, *items]
            else:
                given["input"] = [*asked, *output, *tail, *items]
        elif r.random() < 0.3:
            given["input"] = [*self._echo(), *items]
        if r.random() < 0.05:
            given["previous_response_id"] = r.choice((*NAMES, "resp_none", *self.responses))
        if r.random() < 0.5:
            given["tools"] = [{"type": "function", "name": "f", "parameters": self._free({"type": "object"})}]
        if r.random() < 0.3:
            given["stream"] = True
        options: dict[str, Any] = {
            "instructions": r.choice(("s", "")), "temperature": 1.0, "top_p": 1.0, "top_k": 0, "user": "ann",
            "max_output_tokens": r.choice((5, 1000)), "store": r.choice((True, False)), "metadata": {"a": 1},
            "reasoning": {"effort": "low"}, "include": [], "tool_choice": r.choice(("auto", "none")),
            "text": {"format": {"type": "text"}}, "parallel_tool_calls": True,
        }  # fmt: skip
        for name in r.sample(list(options), r.randrange(4)):
            given[name] = options[name]
        if r.random() < 0.05:
            name = r.choice(list(UNSERVED))
            given[name] = UNSERVED[name]
        return given

    def _echo(self) -> list[dict[str, Any]]:
        """A reply that was made elsewhere, with a call, its thoughts kept or not."""
        r = self.random
        thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]}
        call = {"type": "function_call", "call_id": r.choice(("c", *NAMES)), "name": "f", "arguments": "{}"}
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": r.choice(TEXTS)}]}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
        return [*r.choice(([], [thought])), said, call, result]

    @property
    def responded(self) -> list[tuple[list[Any], list[Any], str]]:
        """What was asked, whole, and answered, and the response's id."""
        self._responded: list[tuple[list[Any], list[Any], str]] = getattr(self, "_responded", [])
        return self._responded

    def _learn(self, path: str, given: Any, answer: Answer) -> None:
        if not path.startswith(PATH):
            return super()._learn(path, given, answer)
        if path == PATH and answer.status == 200 and answer.body.startswith(b"{"):
            found = orjson.loads(answer.body)
            self.responses = [*self.responses[-20:], found["id"]]
            asked = given.get("input")
            if isinstance(asked, list) and len(asked) < 20:
                self._responded = [*self.responded[-20:], (asked, found["output"], found["id"])]
        return None
