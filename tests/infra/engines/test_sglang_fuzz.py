"""Whatever comes to SGLang's plugin or from it: it is taken or refused in clear words, and nothing ends the server."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.consumers.learner.version.sender import WeightSender
from millrace.consumers.reloader.broadcast import FromLearner
from millrace.consumers.reloader.transport import SharedDirectory
from millrace.infra.engines.base import LEAST_REPETITION, Sampling
from millrace.infra.engines.control import Broadcast, EngineState
from millrace.infra.engines.sglang.control import SglangControl, file_tensors
from millrace.infra.engines.sglang.engine import SglangEngine
from millrace.infra.engines.sglang.launch import Sglang
from millrace.infra.engines.sglang.wire import AnswerReader, read_notice
from millrace.infra.engines.sglang.worker import ABORT, RECEIVE, SamplingSettings
from millrace.infra.errors import EngineError, EngineRejected, EngineUnavailable
from millrace.infra.process.net import LOCALHOST
from tests.support.announced import weight_event
from tests.support.engines import complete, differences
from tests.support.tiny_model import VOCAB, write_model

PROMPT = [22, 10, 14, 40]
EXACT = 1e-5
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def shaped(**fields: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    """Objects with these fields, any of which may be missing or anything."""
    return st.fixed_dictionaries({}, optional={name: value | json_values for name, value in fields.items()})


numbers = st.integers(0, 9) | st.sampled_from([2**31 - 1, 2**31, 2**53])
NOTICES = shaped(
    sglang=st.sampled_from(["0.5.21", "0.5.23", "0.6", "9" * 5000, "0.5.²", ""]),
    incarnation=st.text(max_size=3),
    label=st.text(max_size=3),
    is_paused=st.booleans(),
    model_type=st.text(max_size=3),
    ranks=numbers,
    replicas=numbers,
    adapters=st.none() | st.lists(st.text(max_size=3), max_size=2),
)
SCORES = st.lists(st.tuples(st.none() | st.floats(-9, 0), numbers, st.none()), max_size=3)
METAS = shaped(
    finish_reason=st.none() | shaped(type=st.sampled_from(["stop", "length", "abort", "x" * 9999]), matched=numbers),
    prompt_tokens=numbers,
    completion_tokens=st.integers(-3, 4),
    weight_versions=st.lists(shaped(version=st.text(max_size=3), start=numbers, end=numbers), max_size=2),
    output_token_logprobs=SCORES,
    output_top_logprobs=st.lists(st.none() | SCORES, max_size=3),
)
ITEMS = shaped(
    meta_info=METAS, output_ids=st.lists(numbers, max_size=3), index=st.integers(-2, 3), error=shaped(code=numbers)
)


def dumped(value: object) -> bytes:
    return json.dumps(value).encode(errors="surrogatepass")


@given(st.binary() | NOTICES.map(dumped), st.sampled_from([200, 200, 200, 401, 404, 500]))
@example(dumped({"sglang": []}), 200)
@example(b"[" * 100_000, 200)
def test_a_notice_is_read_or_is_no_servers_that_is_known(body: bytes, status: int) -> None:
    try:
        notice = read_notice(status, body, "u")
    except EngineUnavailable:
        return
    assert status == 200
    assert notice.sglang.startswith("0.5.")


@given(st.lists(ITEMS.map(dumped) | st.lists(ITEMS, max_size=3).map(dumped) | st.binary(), max_size=3))
@example([b"[" * 100_000])
def test_an_answer_is_read_whole_or_passes_for_none(bodies: list[bytes]) -> None:
    sampling = Sampling(9, n=2, top_logprobs=2)
    read, lengths = AnswerReader(sampling, "u"), [0, 0]
    try:
        for body in bodies:
            for chunk in read(body)[0]:
                assert len(chunk.token_ids) == len(chunk.logprobs)
                assert all(len(place) <= 2 for place in chunk.tops)
                lengths[chunk.index] += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    assert (chunk.spans[-1].end if chunk.spans else 0) == lengths[chunk.index]
    except (EngineUnavailable, EngineRejected):
        pass


@given(
    st.binary(max_size=40)
    | json_values.map(dumped)
    | shaped(w=shaped(dtype=st.text(), shape=st.lists(numbers))).map(dumped)
)
@example(b"[" * 100_000)
@example(b'{"w": 1}')
def test_a_weight_file_has_tensors_or_none(tmp_path_factory: pytest.TempPathFactory, header: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "header"
    folder.mkdir(exist_ok=True)
    for length in (len(header), 2**63, 7):
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header)
        tensors = file_tensors(folder)
        assert tensors is None or all(isinstance(name, str) for name, _, _ in tensors)


SETTINGS = shaped(
    top_k=numbers,
    repetition_penalty=st.floats(0, 2),
    logit_bias=st.dictionaries(st.sampled_from(["1", "x"]), st.floats(), max_size=2),
    stop_token_ids=st.lists(numbers, max_size=2),
    temperature=st.floats(),
)


@given(SETTINGS)
def test_what_the_plugin_lets_pass_fits_the_schedulers_tensors(params: dict[str, object]) -> None:
    try:
        settings = msgspec.convert(params, SamplingSettings)
    except msgspec.ValidationError:
        return
    assert (settings.top_k or 0) < 2**31
    assert settings.repetition_penalty is None or settings.repetition_penalty >= LEAST_REPETITION
    assert all(math.isfinite(value) for value in (settings.logit_bias or {}).values())
    assert all(0 <= token < 2**31 for token in settings.stop_token_ids or ())


# ---------------------------------------------------------------------- the real server


REFUSED: dict[str, dict[str, object]] = {
    "top_k beyond 32 bits": {"top_k": 2**31},
    "a fraction of top_k": {"top_k": 2.5},
    "words": {"temperature": "hot"},
    "infinite heat": {"temperature": math.inf},
    "no probability": {"top_p": math.nan},
    "infinite bias": {"logit_bias": {"5": math.inf}},
    "no bias": {"logit_bias": {"5": None}},
    "bias of no token": {"logit_bias": {str(VOCAB): 1.0}},
    "bias of a word": {"logit_bias": {"x": 1.0}},
    "a penalty near 0": {"repetition_penalty": 1e-40},
    "a negative length": {"max_new_tokens": -1},
    "a stop of no token": {"stop_token_ids": [2**31]},
    "a stop that penalties cannot reach": {"stop_token_ids": [VOCAB], "min_new_tokens": 2},
    "many stops": {"stop": ["a"] * 33},
    "a seed beyond 64 bits": {"sampling_seed": 2**63},
}
FOREIGN: dict[str, dict[str, object]] = {
    "no prompt": {"input_ids": []},
    "one of two": {"input_ids": [[5], []]},
    "beyond the vocabulary": {"input_ids": [[5], [VOCAB]]},
    "negative": {"input_ids": [-1]},
    "beyond 64 bits": {"input_ids": [2**70]},
    "fractions": {"input_ids": [1.5]},
    "words": {"input_ids": ["a"]},
    "beyond the context": {"input_ids": [5] * 100_000},
    "all rivals and more": {"top_logprobs_num": VOCAB + 1},
    "rivals below none": {"top_logprobs_num": -1},
    "an adapter": {"lora_path": "p@1"},
}
ODD = [
    Sampling(4, top_k=2**31 - 1),
    Sampling(4, temperature=5e-324),
    Sampling(4, temperature=1.1e-6),
    Sampling(4, top_p=5e-324),
    Sampling(4, min_p=5e-324),
    Sampling(4, repetition_penalty=LEAST_REPETITION),
    Sampling(4, presence_penalty=-2, frequency_penalty=2, repetition_penalty=2),
    Sampling(4, logit_bias=tuple((token, -100.0) for token in range(VOCAB))),
    Sampling(4, logit_bias=tuple((token, 100.0) for token in range(0, VOCAB, 2))),
    Sampling(4, stop=("\0", "\u202e", "ﷺ" * 1000, "👩‍👩‍👧‍👦", "x" * 100_000)),
    Sampling(4, stop_ids=(VOCAB, 2**31 - 1)),
    Sampling(4, seed=2**63 - 1, n=3),
    Sampling(4, seed=-(2**63), n=3),
    Sampling(2**31, n=2),
    Sampling(4, n=70),
]
"""what the seam takes at its rims"""


@pytest.fixture(scope="module")
def control_free(sglang: Sglang) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sglang.url, timeout=120) as client:
        yield client


@pytest.fixture
async def control(sglang: Sglang) -> AsyncIterator[SglangControl]:
    one = SglangControl(sglang.url)
    yield one
    await one.close()


@pytest.fixture
async def before(control: SglangControl) -> AsyncIterator[EngineState]:
    """How the server stands; it stands so at the end, of the same start."""
    state = await control.state()
    yield state
    assert await control.state() == state


@pytest.mark.slow
@pytest.mark.sglang
class TestServer:
    @pytest.mark.usefixtures("before")
    async def test_what_no_scheduler_outlives_is_refused(self, control_free: httpx.Client) -> None:
        plain = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
        bodies = {name: plain | {"sampling_params": params} for name, params in REFUSED.items()}
        for name, body in (bodies | {name: plain | more for name, more in FOREIGN.items()}).items():
            content = json.dumps(body)
            for stream in (False, True):
                content = json.dumps(body | {"stream": stream})
                answer = control_free.post("/generate", content=content, headers={"content-type": "application/json"})
                text = answer.text
                assert answer.status_code == 400 or (stream and '"code":400' in text.replace(" ", "")), (
                    name,
                    text,
                )
        for body in ({"a": 1}, ["\0", "x" * 100_000], "all"):
            assert control_free.post(ABORT, json=body).status_code in (200, 400)

    @pytest.mark.usefixtures("before")
    async def test_what_the_seam_takes_is_sampled(self, sglang: Sglang, models: tuple[Path, Path]) -> None:
        engine = SglangEngine(sglang.url)
        for sampling in ODD:
            bounded = replace(sampling, ignore_eos=True)
            for choice in await complete(engine, PROMPT, bounded, stream=sampling.n == 1):
                assert len(choice.token_ids) == min(sampling.max_tokens, 512 - len(PROMPT))
                assert max(differences(models[0], PROMPT, choice.token_ids, choice.logprobs)) < EXACT
        await engine.close()

    async def test_what_is_no_broadcast_changes_nothing(
        self,
        control: SglangControl,
        before: EngineState,
        control_free: httpx.Client,
        models: tuple[Path, Path],
        sender: WeightSender,
    ) -> None:
        await control.pause()
        await control.load(models[0])
        offer = await offered(control, sender, models[1])
        slots = json.loads(offer.header[8:])
        name = "lm_head.weight"
        others: dict[str, dict[str, object]] = {
            "fewer tensors": {one: about for one, about in slots.items() if one != name},
            "another type": slots | {name: slots[name] | {"dtype": "X9"}},
            "another shape": slots | {name: slots[name] | {"shape": [VOCAB, 65]}},
            "an absurd length": slots | {name: slots[name] | {"data_offsets": [0, 2**62]}},
            "a list": {name: {"dtype": [], "shape": "x"}},
        }
        headers = {case: replace(offer, header=header_of(other)) for case, other in others.items()}
        for case, wrong in headers.items():
            with pytest.raises(EngineError):
                await control.receive(wrong)
            fresh = await offered(control, sender, models[1])
            told = control_free.post(RECEIVE, json={"group": fresh.group, "notice": wrong.notice}).json()
            assert told["success"] is False, case
        notice, group = offer.notice, offer.group
        header = str(notice["header"])
        notices: list[object] = [
            {},
            {"header": 5},
            notice | {"header": header[:-3]},
            notice | {"header": "é"},
            "all",
            None,
        ]
        groups: list[object] = [{}, group | {"port": "x"}, group | {"port": 0}, group | {"port": 70000}]
        groups += [group | {"host": "\0"}, group | {"timeout_s": "long"}, group | {"ranks": "many"}, []]
        for body in [
            *({"group": group, "notice": one} for one in notices),
            *({"group": one, "notice": notice} for one in groups),
        ]:
            answer = control_free.post(RECEIVE, json=body)
            assert answer.status_code == 400 or answer.json()["success"] is False, body
        await control.resume()
        await self._samples(control.url, models[0])

    @pytest.mark.usefixtures("before")
    async def test_what_was_loaded_in_part_is_said_to_be_half_there(
        self, control: SglangControl, models: tuple[Path, Path], sender: WeightSender, tmp_path: Path
    ) -> None:
        wide = write_model(tmp_path / "wide", 3, hidden=96)
        await control.pause()
        await control.load(models[0])
        offer = await offered(control, sender, wide)
        with pytest.raises(EngineRejected, match="other tensors"):
            await control.receive(offer)
        with pytest.raises(EngineError, match="could not be loaded, and are half there"):
            await control._change(RECEIVE, {"group": offer.group, "notice": offer.notice})
        with pytest.raises(EngineError):
            await control.load(wide)
        await control.load(models[0])
        assert await control.reset_prefix_cache()
        await control.resume()
        await self._samples(control.url, models[0])

    @staticmethod
    async def _samples(url: str, model: Path) -> None:
        engine = SglangEngine(url)
        (choice,) = await complete(engine, PROMPT, Sampling(20, ignore_eos=True))
        assert max(differences(model, PROMPT, choice.token_ids, choice.logprobs)) < EXACT
        await engine.close()


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    one = WeightSender(LOCALHOST, timeout_s=5)
    yield one
    one.close()


async def offered(control: SglangControl, sender: WeightSender, folder: Path) -> Broadcast:
    """A group that waits for the engine, with the weights in `folder`."""
    event = {**weight_event(1, folder), "broadcast": sender.url}
    sender.hold(1, event["digest"], folder / "model.safetensors")
    return await FromLearner(SharedDirectory())._ask(control, event)


def header_of(slots: dict[str, object]) -> bytes:
    """The first bytes of a safetensors file."""
    body = json.dumps(slots).encode()
    return len(body).to_bytes(8, "little") + body
