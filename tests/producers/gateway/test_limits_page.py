"""The page of limits has every bound with its number, and every limit of the gateway's settings with its default."""

from __future__ import annotations

import re

from millrace.infra.config.serving import Gateway
from millrace.producers.gateway.options import GatewayOptions
from millrace.schemas import bounds
from tests.support.documents import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE, re.MULTILINE))


def test_every_bound_is_on_the_page_with_its_number() -> None:
    known = {name: value for name, value in vars(bounds).items() if name.isupper()}
    assert {name: ROWS.get(name) for name in known} == {name: str(value) for name, value in known.items()}


def test_every_limit_of_the_gateway_is_on_the_page_with_its_default() -> None:
    fields = {name: field.default for name, field in Gateway.model_fields.items()}
    limits = {name for name in ROWS if name.islower()}
    assert limits == {name for name in fields if name.startswith(("max_", "body_", "capture_max"))}
    assert {name: float(ROWS[name]) for name in limits} == {name: float(fields[name]) for name in limits}
    options = GatewayOptions("policy")
    for name in limits - {"capture_max_bytes"}:
        assert float(ROWS[name]) == float(getattr(options, name))
