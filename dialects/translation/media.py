"""Images, files and sound of one API in the words of another. Pure.

Invariant: what the other API has no words for is refused with its place, never left out nor said to be something
else."""

from __future__ import annotations

from millrace.dialects.conversation import Media, unsupported_error
from millrace.dialects.errors import ApiError
from millrace.dialects.media import AUDIO, PLAIN_TYPE, plain_text, split_data_url
from millrace.schemas.json_values import JsonObject

PDF = "application/pdf"
FILE = "file"
"""of a file that was sent without a name, where one must be said"""


def to_chat(part: Media) -> JsonObject:
    """As a part of chat completions. Raises ApiError 400."""
    url, name = part.address
    match part.kind:
        case "image" if url:
            return {"type": "image_url", "image_url": {"url": url}}
        case "file" if split_data_url(url):
            return {"type": "file", "file": {"filename": name or FILE, "file_data": url}}
        case "audio" if (audio := _audio_of(part)) is not None:
            return audio
    raise _unsaid(part)


def to_responses(part: Media) -> JsonObject:
    """As a part of Responses. Raises ApiError 400."""
    url, name = part.address
    match part.kind:
        case "image" if url:
            return {"type": "input_image", "image_url": url}
        case "file" if split_data_url(url):
            return {"type": "input_file", "filename": name or FILE, "file_data": url}
        case "file" if url:
            return {"type": "input_file", "file_url": url}
        case "audio" if (audio := _audio_of(part)) is not None:
            return audio
    raise _unsaid(part)


def to_messages(part: Media) -> JsonObject:
    """As a block of Messages, which takes files that are PDF or plain text. Raises ApiError 400."""
    url, name = part.address
    title = {"title": name} if name else {}
    inside = split_data_url(url)
    match part.kind:
        case "image" | "file" if url and inside is None:
            source: JsonObject = {"type": "url", "url": url}
            return {"type": "image", "source": source} if part.kind == "image" else {**_DOCUMENT, "source": source}
        case "image" if inside is not None:
            return {"type": "image", "source": _base64(*inside)}
        case "file" if inside is not None and inside[0] == PDF:
            return {**_DOCUMENT, "source": _base64(*inside), **title}
        case "file" if inside is not None and inside[0] == PLAIN_TYPE and (text := plain_text(inside[1])) is not None:
            return {**_DOCUMENT, "source": {"type": "text", "media_type": PLAIN_TYPE, "data": text}, **title}
    raise _unsaid(part)


_DOCUMENT = {"type": "document"}


def _base64(type: str, data: str) -> JsonObject:
    return {"type": "base64", "media_type": type, "data": data}


def _audio_of(part: Media) -> JsonObject | None:
    inside = split_data_url(part.address.url)
    if inside is None or not inside[0].startswith(AUDIO):
        return None
    return {"type": "input_audio", "input_audio": {"data": inside[1], "format": inside[0].removeprefix(AUDIO)}}


def _unsaid(part: Media) -> ApiError:
    return unsupported_error(part.at, f"{part.type!r} cannot be passed on to an upstream of another API")
