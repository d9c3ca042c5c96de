"""The layout of verifiers: the rows of its `results.jsonl`."""

from __future__ import annotations

from millrace.dialects.dialogue import Unsayable
from millrace.formats.sample import ExportedSample
from millrace.formats.writers.base import Content, ExportLayout


class Verifiers(ExportLayout):
    """One row a rollout. `example_id` numbers tasks from 0 in the order in which they occur."""

    name = "verifiers"
    help = "verifiers results.jsonl, a rollout a row: prompt, completion, reward, metrics by source, timing"

    def __init__(self) -> None:
        self._examples: dict[str, int] = {}

    def rows(self, sample: ExportedSample) -> list[Content]:
        """The sample's row."""
        if len(sample.dialogues) > 1:
            raise Unsayable("several_lineages", f"it has {len(sample.dialogues)} lineages, and a row here holds one")
        ((lineage, calls),) = sample.dialogues.items()
        record, prompt, whole = sample.record, calls[0].messages, calls[-1].whole
        if whole[: len(prompt)] != prompt:
            raise Unsayable("rewritten", "its agent rewrote what it had asked first")
        latency = sum(call["latency_us"] for call in sample.calls[lineage]) / 1000
        judged = sample.judged()
        metrics = {one["source"]: one["value"] for one in record["rewards"] if one["value"] is not None}
        return [
            {
                "example_id": self._examples.setdefault(record["task_id"], len(self._examples)),
                "task": record["policy"],
                "prompt": prompt,
                "completion": whole[len(prompt) :],
                "answer": "",
                "info": sample.facts(),
                "reward": judged,
                "metrics": metrics,
                "error": None,
                "is_completed": record["status"] == "completed",
                "is_truncated": record["status"] == "truncated",
                "stop_condition": record["status"],
                "timing": {"generation_ms": latency, "scoring_ms": 0.0, "total_ms": latency},
                "tool_defs": calls[-1].tools or None,
            }
        ]
