"""What a client is told when a request cannot be served, in OpenAI's shape."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from millrace.infra.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable, GatewayError

RETRY_AFTER_S = 1
"""seconds after which a client may try again, where nobody knows better"""


class ApiError(GatewayError):
    """A refusal with its HTTP status. `type` and `code` are what OpenAI clients switch on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.type = type
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The error as JSON."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self, body: bytes | None = None) -> Response:
        """The error as a response, in OpenAI's shape unless `body` is that of another API."""
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else None
        return Response(self.body() if body is None else body, self.status, headers, "application/json")


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """The client must change its request."""
    return ApiError(400, message, param=param, code=code)


def not_held_error() -> ApiError:
    """Another process of the gateway is asked next; no client is told this."""
    return ApiError(421, "This process holds no such conversation", code="not_held")


def of_engine(error: EngineError) -> ApiError:
    """What an engine's failure means to the client: its own mistake (4xx), busy (429), or try again (502, 503, 504). A
    key that the engine refuses is never the client's, and where the engine is is nobody's but the operator's: that is
    in the log. The words of an upstream, which its refusals pass on too, are told."""
    match error:
        case EngineRejected(status=401 | 403):
            message = "The engine does not let the gateway in: its operator should look at [engine] key"
            return ApiError(502, message, type="server_error", code="engine_unauthorized")
        case EngineRejected():
            status = error.status if 400 <= error.status < 500 else 400
            return ApiError(status, str(error), code="engine_rejected")
        case EngineTimeout():
            message = "The engine sent nothing for too long: try again"
            return ApiError(504, message, type="server_error", code="engine_timeout")
        case EngineUnavailable(status=429):
            message = "The engine has too much to do: try again later"
            wait = error.retry_after_s or RETRY_AFTER_S
            return ApiError(429, message, type="rate_limit_error", code="engine_busy", retry_after_s=wait)
        case EngineUnavailable(status=503):
            message = "The engine takes no calls now: try again"
            wait = error.retry_after_s or RETRY_AFTER_S
            return ApiError(503, message, type="server_error", code="engine_unavailable", retry_after_s=wait)
        case EngineUnavailable(words=message) if message:
            return ApiError(502, message, type="server_error", code="engine_unavailable", retry_after_s=RETRY_AFTER_S)
        case _:
            message = "The engine does not answer, or broke off: try again"
            return ApiError(502, message, type="server_error", code="engine_unavailable", retry_after_s=RETRY_AFTER_S)
