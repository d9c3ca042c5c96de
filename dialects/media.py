"""Images, files and sound in a request, as every API can be told them: by an address, or within a `data:` URL.

Invariants: an address stays what its client said; what is said in a way that other APIs do not know (an id at a
provider) has no address. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import NamedTuple

from millrace.dialects.answers import mapping, text
from millrace.schemas.json_values import Json

DATA = "data:"
BASE64_MARK = ";base64,"
PLAIN_TYPE = "text/plain"
AUDIO = "audio/"


class Address(NamedTuple):
    """Where some media are, "" where that is not known, and the name of a file that has one."""

    url: str = ""
    name: str = ""


def data_url(type: str, data: str) -> str:
    """A URL that holds base64 text of a media type; "" where either is missing."""
    return f"{DATA}{type}{BASE64_MARK}{data}" if type and data else ""


def split_data_url(url: str) -> tuple[str, str] | None:
    """Media type and base64 text within a `data:` URL; None for any other."""
    type, mark, data = url.removeprefix(DATA).partition(BASE64_MARK)
    return (type, data) if url.startswith(DATA) and mark else None


def plain_text(data: str) -> str | None:
    """The text that base64 text stands for; None where it is none."""
    try:
        return base64.b64decode(data, validate=True).decode()
    except ValueError:
        return None


def of_chat(part: Mapping[str, Json]) -> Address:
    """Of a part of chat completions."""
    file = mapping(part.get("file"))
    url = text(mapping(part.get("image_url")).get("url")) or _inside(file.get("file_data")) or _audio_of(part)
    return Address(url, text(file.get("filename")) or "")


def of_responses(part: Mapping[str, Json]) -> Address:
    """Of a part of Responses."""
    url = text(part.get("image_url")) or _inside(part.get("file_data")) or text(part.get("file_url")) or _audio_of(part)
    return Address(url, text(part.get("filename")) or "")


def of_messages(block: Mapping[str, Json]) -> Address:
    """Of a block of Messages."""
    source = mapping(block.get("source"))
    type, data = text(source.get("media_type")) or "", text(source.get("data")) or ""
    name = text(block.get("title")) or ""
    match source.get("type"):
        case "base64":
            return Address(data_url(type, data), name)
        case "text":
            return Address(data_url(PLAIN_TYPE, base64.b64encode(data.encode(errors="replace")).decode()), name)
        case _:
            return Address(text(source.get("url")) or "", name)


def _inside(data: object) -> str:
    url = text(data) or ""
    return url if split_data_url(url) else ""


def _audio_of(part: Mapping[str, Json]) -> str:
    audio = mapping(part.get("input_audio"))
    format, data = text(audio.get("format")) or "", text(audio.get("data")) or ""
    return data_url(AUDIO + format, data) if format else ""
