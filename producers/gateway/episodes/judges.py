"""Who may judge: for which sources a caller may record rewards, and how many.

Invariants: a session's own key, which the agent under training holds, speaks for `agent` alone, and not even for that
where the episode awaits it; a static key speaks for every source but those of deployed verifiers, which its entry in
`[gateway.keys]` must name as `judges`, and so does everyone where the gateway asks for no keys; the workers' key speaks
for all."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from millrace.dialects.errors import ApiError, bad_request
from millrace.schemas import bounds

SELF = "agent"
"""the one source of a session's own key: what an agent says of itself"""


def check_source(source: str, *, own_key: bool, awaits: Collection[str], reserved: Collection[str]) -> None:
    """Raises ApiError 403 for a source that the caller may not speak for.

    own_key: whether the caller holds the session's own key. awaits: the sources that the episode waits for. reserved:
    sources of verifiers that the caller does not judge for."""
    if own_key and (source != SELF or source in awaits):
        raise ApiError(
            403,
            f"A session's own key cannot speak for {source!r}: it may say what the agent thinks of itself (source "
            f"{SELF!r}, where nobody waits for that). Send rewards of other sources with a key of [gateway.keys]",
            code="wrong_source",
            param="source",
        )
    if not own_key and source in reserved:
        raise ApiError(
            403,
            f"This caller cannot speak for {source!r}, a verifier of this deployment: send a key that names it under "
            "`judges` in [gateway.keys], or use another source",
            code="wrong_source",
            param="source",
        )


def check_room(known: Iterable[str], source: str, awaits: Collection[str]) -> None:
    """Raises ApiError 400 where an episode keeps no more rewards of such a source.

    known: the sources of those that it has. Awaited sources and others have room of their own, as where episodes are
    sealed, so that nobody fills the room of those who are awaited."""
    count = sum((other in awaits) == (source in awaits) for other in known)
    if count >= bounds.REWARDS:
        which = "of those that it awaits" if source in awaits else "of sources that it does not await"
        raise bad_request(f"This episode has {count} rewards {which} and keeps no more", code="too_many_rewards")
