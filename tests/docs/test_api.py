"""The page of the public face and the description of the gateway's routes are those that the code makes."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

import millrace
from millrace.dialects.errors import ApiError
from millrace.producers.gateway.app import routes
from millrace.producers.gateway.episodes import bodies
from tests.docs import openapi, public

WRITTEN: dict[str, Any] = json.loads(openapi.FILE.read_text())


def test_the_page_is_what_the_code_says() -> None:
    assert public.PAGE.read_text() == public.page(), "run .venv/bin/python -m tests.docs.public"


def test_the_page_has_every_public_name() -> None:
    shown = public.PAGE.read_text()
    for name in millrace.__all__:
        assert re.search(rf"^##+ .*\b{name}\b", shown, re.MULTILINE), name
    for kind in (millrace.Session, millrace.AsyncSession):
        for name in (name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))):
            assert re.search(rf"^- `(await )?{name}\(", shown, re.MULTILINE), name


def test_the_description_is_what_the_code_says() -> None:
    assert openapi.FILE.read_text() == openapi.text(), "run .venv/bin/python -m tests.docs.openapi"


def test_every_route_is_described_and_every_description_is_of_a_route() -> None:
    described = {(path, method.upper()) for path, item in WRITTEN["paths"].items() for method in item}
    assert described == {(path.replace(":path", ""), method) for path, method, _ in routes()}


def test_every_reference_leads_somewhere() -> None:
    named = re.findall(r'"\$ref": "#/components/(\w+)/([\w.]+)"', openapi.FILE.read_text())
    assert len(named) > 10
    for part, name in named:
        assert name in WRITTEN["components"][part], name


@pytest.mark.parametrize("route", [route for route in routes() if route[1] == "POST"], ids=lambda route: route[2])
def test_a_body_has_the_fields_that_the_gateway_takes(route: tuple[str, str, str]) -> None:
    path, method, name = route
    of = openapi.BODIES[name]
    schema = WRITTEN["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    found = WRITTEN["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert set(found["properties"]) == {field.name for field in msgspec.structs.fields(of)}


def test_every_kind_of_event_is_described() -> None:
    events = WRITTEN["components"]["schemas"]["EventsIn"]["properties"]["events"]["items"]
    assert {one["$ref"].rpartition("/")[2] for one in events["anyOf"]} == {of.__name__ for of in bodies.ACTORS}


def test_a_refusal_has_the_shape_that_is_described() -> None:
    told = json.loads(ApiError(400, "no", code="c").body())["error"]
    described = WRITTEN["components"]["schemas"]["Error"]["properties"]["error"]
    assert set(told) == set(described["properties"]) == set(described["required"])
