"""A response that its caller was told to be deleted can be named no more, whenever the gateway died meanwhile; what
goes on from it, and what the log has of it, stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace.dialects.rendering.template import TemplateRenderer
from millrace.infra import faults
from millrace.infra.gateway_processes import folder_of
from millrace.producers.gateway.sessions.deletions import DeletedResponses
from millrace.producers.gateway.sessions.sessions import Sessions
from tests.support.in_process import InProcess, Played

PATH = "/v1/responses"


def opened(folder: Path, renderer: TemplateRenderer) -> InProcess:
    def script(body: bytes) -> Played:
        ids = renderer.tokenizer.encode("Yes.<|im_end|>")
        spans = [{"version": "policy@0", "start": 0, "end": len(ids)}]
        logprobs = {"content": [{"logprob": -0.5}] * len(ids)}
        choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop", "weight_versions": spans}
        return Played(parts=[orjson.dumps({"choices": [choice]})])

    return InProcess(folder, renderer, script)


async def asked(gateway: InProcess, **more: Any) -> Any:
    return await gateway.ask("POST", PATH, orjson.dumps({"model": "m", "input": "hi", **more}))


async def statuses(gateway: InProcess, id: str) -> tuple[int, int, int]:
    """Of naming a response, of asking for it, and for what it was asked."""
    named = await asked(gateway, previous_response_id=id)
    got = [(await gateway.ask("GET", f"{PATH}/{id}{below}")).status for below in ("", "/input_items")]
    return named.status, got[0], got[1]


GONE, THERE = (400, 404, 404), (200, 200, 200)


class Killed(BaseException):
    """As if the process ended there."""


async def test_it_stays_deleted_however_the_gateway_ended(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = opened(tmp_path, renderer)
    first = (await asked(gateway)).json["id"]
    second = (await asked(gateway, previous_response_id=first)).json["id"]
    other = (await asked(gateway)).json["id"]
    answer = await gateway.ask("DELETE", f"{PATH}/{first}")
    assert answer.json == {"id": first, "object": "response", "deleted": True}
    assert (await gateway.ask("DELETE", f"{PATH}/{first}")).status == 404
    for _ in range(2):
        assert [await statuses(gateway, id) for id in (first, second, other)] == [GONE, THERE, THERE]
        await gateway.close()
        gateway = opened(tmp_path, renderer)
    # Behind the write and before the answer: it was not told, and it is gone all the same.
    monkeypatch.setattr(faults, "point", killed_at("gateway.deleted"))
    with pytest.raises(Killed):
        gateway.sessions.replies.delete(other)
    await gateway.close()
    monkeypatch.undo()
    gateway = opened(tmp_path, renderer)
    assert [await statuses(gateway, id) for id in (first, second, other)] == [GONE, THERE, GONE]
    await gateway.close()
    # In the middle of the write, at any byte of it: all that was told before holds, and nothing else is taken.
    file = tmp_path / "capture" / "deleted"
    whole = file.read_bytes()
    for torn in range(len(b"\n%s\n" % second.encode())):
        file.write_bytes(whole + (b"\n%s\n" % second.encode())[:torn])
        gateway = opened(tmp_path, renderer)
        expected = GONE if torn > len(second) else THERE
        assert [await statuses(gateway, id) for id in (first, second, other)] == [GONE, expected, GONE]
        if torn == 7:  # what is deleted behind a torn line is not lost to it
            assert (await gateway.ask("DELETE", f"{PATH}/{second}")).status == 200
            await gateway.close()
            gateway = opened(tmp_path, renderer)
            assert await statuses(gateway, second) == GONE
        await gateway.close()


def killed_at(wanted: str) -> Any:
    def point(name: str) -> None:
        if name == wanted:
            raise Killed

    return point


async def test_a_full_disk_deletes_nothing(
    tmp_path: Path, renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = opened(tmp_path, renderer)
    id = (await asked(gateway)).json["id"]

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = await gateway.ask("DELETE", f"{PATH}/{id}")
    assert (answer.status, answer.json["error"]["code"]) == (503, "log_full")
    monkeypatch.undo()
    assert await statuses(gateway, id) == THERE
    await gateway.close()


def test_the_file_names_no_more_than_the_log_has(tmp_path: Path) -> None:
    deleted = DeletedResponses(tmp_path)
    assert not deleted.left
    for id in ("resp_1", "resp_2", "resp_3"):
        deleted.add(id)
    again = DeletedResponses(tmp_path)
    assert again.left == {"resp_1", "resp_2", "resp_3"}
    again.settle(lambda id: id == "resp_2")
    assert DeletedResponses(tmp_path).left == {"resp_2"}
    assert (tmp_path / "deleted").stat().st_mode & 0o777 == 0o600


def test_the_processes_of_one_gateway_forget_what_is_their_own(tmp_path: Path) -> None:
    """A start drops ids that its log does not have: never those of another process's log."""
    for index in (0, 1):
        folder_of(tmp_path / "capture", index).mkdir()
        Sessions(tmp_path / "capture", "p", index=index).replies._deleted.add(f"resp_{index}")
    for index in (1, 0, 1):
        sessions = Sessions(tmp_path / "capture", "p", index=index)
        assert sessions.replies._deleted.left == {f"resp_{index}"}
        sessions.replies._deleted.settle(f"resp_{index}".__eq__)
