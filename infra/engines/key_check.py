"""What an engine asks of everybody: its key. Middleware of vLLM's server and of the in-process one.

vLLM's own check covers the routes of its API alone; those that load weights and run calls in its workers would stay
open. Invariant: without the key in `KEY` nothing but the health check is answered; the key is in no command line."""

from __future__ import annotations

import hmac
import os

from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "VLLM_API_KEY"
"""variable with the key; vLLM reads it too"""
OPEN = ("/health", "/ping")

REFUSAL = b'{"error":{"message":"wrong or missing key","type":"invalid_request_error","param":null,"code":"wrong_key"}}'


class KeyCheck:
    """An ASGI application in front of another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._key = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _is_allowed(self, scope: Scope) -> bool:
        key = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        return hmac.compare_digest(key, self._key)
