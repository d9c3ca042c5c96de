"""The kinds of evidence that are taken are those that the schema of rewards describes."""

from __future__ import annotations

import json
import re
from typing import get_args

from millrace.schemas.registry import AVRO
from millrace.schemas.signals import Signal


def test_the_schema_names_the_same_kinds_in_the_same_order() -> None:
    fields = {field["name"]: field for field in json.loads((AVRO / "Reward.avsc").read_text())["fields"]}
    assert tuple(re.split(r", | or ", fields["signal"]["doc"])) == get_args(Signal)
