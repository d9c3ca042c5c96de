"""Every API that calls are translated to, and the choice among those of an upstream."""

from __future__ import annotations

from collections.abc import Collection

from millrace.dialects.translation.base import Translator
from millrace.dialects.translation.chat import ToChat
from millrace.dialects.translation.messages import ToMessages
from millrace.dialects.translation.responses import ToResponses

TRANSLATORS: tuple[Translator, ...] = (ToChat(), ToResponses(), ToMessages())
"""the first that an upstream speaks is used: what a request may ask for grows towards the first"""


def translator(speaks: Collection[str], dialect: str) -> Translator | None:
    """How a call of `dialect` reaches an upstream that speaks others; None where it does not."""
    if dialect not in {one.name for one in TRANSLATORS}:
        return None
    return next((one for one in TRANSLATORS if one.name in speaks and one.name != dialect), None)
