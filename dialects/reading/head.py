"""The little that is read of any request on its way to an upstream, whatever its API: nothing here refuses a request
but for being no JSON object.

Invariant: a field of another type than it should have is left out of the record, and goes on as it is."""

from __future__ import annotations

import math

import msgspec

from millrace.dialects import shape
from millrace.dialects.answers import number
from millrace.dialects.errors import bad_request
from millrace.schemas import bounds
from millrace.schemas.json_values import Json
from millrace.schemas.records import Sampling


class RequestHead(msgspec.Struct, kw_only=True):
    """Fields of all APIs together."""

    model: object = None
    stream: object = None
    temperature: object = None
    top_p: object = None
    top_k: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    seed: object = None
    n: object = None
    stop: object = None
    stop_sequences: object = None
    user: object = None
    safety_identifier: object = None
    metadata: object = None

    @property
    def name(self) -> str:
        """The model's, "" where none is said."""
        return self.model if isinstance(self.model, str) else ""

    @property
    def user_id(self) -> Json:
        """What Messages' metadata says of the end user."""
        return self.metadata.get("user_id") if isinstance(self.metadata, dict) else None

    def sampling(self) -> Sampling:
        """How the reply is sampled, as far as it is said and fits a record."""
        stop = self.stop if self.stop is not None else self.stop_sequences
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or len(stops) > bounds.NAMES or not all(isinstance(text, str) for text in stops):
            stops = []
        seed = self.seed if isinstance(self.seed, int) and not isinstance(self.seed, bool) else None
        return {
            "temperature": _real(self.temperature),
            "top_p": _real(self.top_p),
            "top_k": number(self.top_k),
            "max_tokens": number(self.max_completion_tokens or self.max_tokens or self.max_output_tokens),
            "seed": seed if seed is not None and -bounds.SEED - 1 <= seed <= bounds.SEED else None,
            "stop": stops,
            "n": number(self.n, 1) or 1,
        }


FIELDS = RequestHead.__struct_fields__
FIELD_BYTES = 64 << 10
"""bytes up to which a field is read; a longer one goes on as it is, and is in no record"""
_Members = msgspec.defstruct("_Members", [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in FIELDS])
_members = msgspec.json.Decoder(_Members)


def read_head(body: bytes) -> RequestHead:
    """What a request says, of any number of values and as deep as a parser goes: an upstream has bounds of its own.
    Raises ApiError 400 for what is no JSON object, or nests deeper."""
    try:
        members = _members.decode(body)
        # Each once more: what is skipped is looked at by nobody, and may be no text of JSON.
        return RequestHead(**{name: _value(getattr(members, name)) for name in FIELDS})
    except RecursionError:
        raise bad_request("The body nests too deep to be read", code="too_deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise shape.json_refusal(body, error) from None


def _value(raw: msgspec.Raw) -> Json:
    data = bytes(raw)
    try:
        return None if len(data) > FIELD_BYTES or shape.unwieldy(data) else msgspec.json.decode(data)
    except msgspec.ValidationError:  # a whole number that no float holds
        return None


def rename_model(body: bytes, model: str) -> bytes:
    """A request for another model: the text of every other value stays as it is. Raises ApiError 400 for what is no
    JSON object."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise shape.json_refusal(body, error) from None
    return msgspec.json.encode({**members, "model": model})


def _real(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value):
        return float(value)
    return 1.0
