"""What a session's own key says to who holds it."""

from __future__ import annotations

from millrace.infra.errors import GatewayError


def session_id(api_key: str) -> str:
    """The session behind a session's own key. Raises GatewayError for any other key."""
    if not api_key.startswith("mr-") or "." not in api_key:
        raise GatewayError("this is not a session's own key: start a session, and use the api_key that it gives you")
    return api_key[3:].partition(".")[0]
