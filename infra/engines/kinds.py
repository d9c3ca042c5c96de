"""The kinds of engines that there are. A new one is a folder beside this file, with a line in each of the two lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, cast
from urllib.parse import urlsplit

from millrace.infra.engines.bearer import Key
from millrace.infra.engines.inprocess.kind import InprocessKind
from millrace.infra.engines.kind import EngineKind
from millrace.infra.engines.sglang.kind import SglangKind
from millrace.infra.engines.vllm.kind import VllmKind
from millrace.infra.errors import ConfigError

if TYPE_CHECKING:
    from millrace.infra.engines.base import Engine

KindName = Literal["vllm", "sglang", "inprocess"]
KINDS: dict[KindName, EngineKind] = {"vllm": VllmKind(), "sglang": SglangKind(), "inprocess": InprocessKind()}


def open_engine(
    kind: str, url: str, *, resubmits: bool, key: Key = "", absent_patience_s: float | None = None
) -> Engine:
    """The engine at `url`; where it ends requests to change its weights (`resubmits`), one that asks for the rest of
    them. absent_patience_s: as of `EngineKind.client`. Raises ConfigError for a url of no engine, and for a kind that
    this release does not have."""
    from millrace.infra.engines.resubmit import ResubmittingEngine

    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"[gateway] engine_url {url!r} must begin with http:// or https://")
    try:
        engine = KINDS[cast(KindName, kind)].client(url, key, absent_patience_s)
    except KeyError:
        raise ConfigError(f"{url} is an engine of kind {kind!r}: this release speaks with {', '.join(KINDS)}") from None
    return ResubmittingEngine(engine) if resubmits else engine


def engine_opener(usual_kind: KindName, *, resubmits: bool, key: Key) -> Callable[..., Engine]:
    """`open_engine` of a url, and of a `kind` where that is another than the usual one."""

    def make(url: str, kind: str = usual_kind, absent_patience_s: float | None = None) -> Engine:
        return open_engine(kind, url, resubmits=resubmits, key=key, absent_patience_s=absent_patience_s)

    return make
