"""From a request to a call of an engine of ours: read, given its session, written as tokens, routed.

Invariant: a call that fails before its first token leaves no trace in its session, and begins no episode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from millrace.dialects import match_keys
from millrace.dialects.all import CHAT
from millrace.dialects.base import Dialect
from millrace.dialects.conversation import Ask, check_strict, messages_of, prompt_message, unknown_fields
from millrace.dialects.errors import ApiError, bad_request, of_engine
from millrace.dialects.rendering.base import Message, Options, PromptTooLong, RenderError
from millrace.dialects.stored_responses import Recaller, StoredResponse
from millrace.dialects.template_options import template_options
from millrace.infra.errors import ConfigError, EngineError, EngineRejected
from millrace.infra.process.offload import HEAVY, run_aside
from millrace.producers.gateway.calls.constraint import grammar_of
from millrace.producers.gateway.calls.engine_call import EngineCall
from millrace.producers.gateway.calls.gateway import CallInSession, Gateway
from millrace.producers.gateway.calls.models import parse_model
from millrace.producers.gateway.calls.routing import RouteWish, chain_of
from millrace.producers.gateway.calls.sampling import to_sampling, too_long
from millrace.producers.gateway.calls.session_matching import ended_refusal
from millrace.producers.gateway.http.callers import Caller
from millrace.producers.gateway.marks import marked_id
from millrace.producers.gateway.options import GatewayOptions
from millrace.producers.gateway.sessions.ownership import hints
from millrace.schemas.requests import RequestOutline, outline_request


class RequestReading(NamedTuple):
    """What a request says, whole in itself whatever earlier responses it named: its messages as templates want them,
    and the digests that say what it continues or repeats."""

    request: Ask
    messages: list[Message]
    digests: list[bytes]
    hash: bytes
    body: bytes
    """whole in itself"""
    used: Sequence[StoredResponse]
    """the responses that it named"""
    options: Options
    """what it says to the chat template"""
    outline: RequestOutline | None
    """where its parts stand in the body"""


def understand(dialect: Dialect, body: bytes, recall: Recaller, options: GatewayOptions) -> RequestReading:
    """What a request says in its dialect. Changes no session, so that it may run beside the loop. Raises ApiError, also
    where a body that was made whole, or its bytes times the choices that it asks for, exceed `max_body_bytes`.

    recall: the earlier responses that it may name, by what it says of its end user."""
    raw_body = body
    request, body, used = dialect.understand(body, recall)
    if options.strict:
        check_strict(request, unknown_fields(request, raw_body), dialect.unknown)
    if request.n * len(body) > options.max_body_bytes:
        most = options.max_body_bytes // len(body)
        raise bad_request(f"n: a request of {len(body)} bytes may ask for at most {most} choices", param="n")
    if used and len(body) > options.max_body_bytes:
        raise too_long(request.asked_in)
    messages = messages_of(request.turns) if request.prompt is None else [prompt_message(request.prompt)]
    digests = match_keys.chain(messages, request.tools)
    hash, chat_options = match_keys.request_hash(body), template_options(body)
    return RequestReading(request, messages, digests, hash, body, used, chat_options, outline_request(body))


logger = logging.getLogger(__name__)


class EngineCalls:
    """The calls of one gateway that its engines answer."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def prepare(
        self, caller: Caller, headers: Mapping[str, str], body: bytes, dialect: Dialect = CHAT
    ) -> EngineCall:
        """Everything of a call before its first token. Raises ApiError."""
        gateway, engines = self.gateway, self.gateway.engines
        if not engines.names:
            raise ConfigError("this gateway has no model to render for: set [gateway] engine_url, or upstream_url")
        size = HEAVY if dialect.refers(body) else len(body)
        recall = partial(gateway.matching.recall, caller, headers)
        reading = await run_aside(size, understand, dialect, body, recall, gateway.options)
        request, body = reading.request, reading.body
        policy, version = parse_model(engines.names, request.model)
        if policy is not None:
            engines.of(policy)
        await gateway.check_serves(caller)
        names = hints(headers, *request.users, name=request.name, field=dialect.names_in)
        session, proven, by = gateway.matching.session_for_call(
            caller, names, reading.messages, reading.digests, reading.used, policy
        )
        try:
            served_policy = engines.of(policy or session.policy)
        except ApiError:
            gateway.discard_if_empty(session)
            raise
        lineages, affinity = session.lineages_of(served_policy.policy), session.engines.get(served_policy.policy)
        response_id = f"{dialect.prefix}{marked_id(gateway.sessions.index)}"
        plan = lineages.open(
            reading.messages, reading.digests, reading.hash, response_id, proven=proven, options=reading.options
        )
        try:
            # A call from here on: neither silence nor another call's failure ends its session meanwhile.
            with CallInSession(session, response_id):
                size = len(body) + plan.weight
                await run_aside(size, lineages.write, plan, request.tools, served_policy.renderer, request.prompt)
                grammar = None
                if request.held:
                    grammar = await run_aside(len(body), grammar_of, request, served_policy.renderer.marks(plan.prompt))
                room = served_policy.max_model_len - len(plan.prompt)
                sampling = to_sampling(request, session.defaults, room, grammar)
                # A grant speaks of the versions of its own policy.
                is_bounded = served_policy.policy == session.policy
                has_grant, minimum = session.has_grant and is_bounded, session.start["min_version"] if is_bounded else 0
                fleet = served_policy.fleet
                chain = chain_of(plan.prompt) if len(fleet.targets) > 1 else ()
                wish = RouteWish(has_grant, minimum, version, affinity, chain, session.id)
                target = await fleet.route(wish, gateway.options.patience_s)
        except BaseException as error:
            session.lineages_of(served_policy.policy).withdraw(plan)
            gateway.discard_if_empty(session)
            if isinstance(error, RenderError):
                raise _unwritten(error, request.asked_in) from error
            if isinstance(error, EngineRejected):
                raise of_engine(error) from error
            if isinstance(error, EngineError):
                raise _no_engine(error) from error
            raise
        if session.has_ended:
            raise ended_refusal(session)
        session.engines[served_policy.policy] = target.url
        return EngineCall(
            session=session,
            dialect=dialect,
            body=body,
            outline=reading.outline,
            identified_by=by,
            payer=caller.key,
            name=response_id,
            request=request,
            plan=plan,
            sampling=sampling,
            served_policy=served_policy,
            target=target,
            wish=wish,
            process=gateway.sessions.index,
        )

    async def count(self, parse: Callable[[bytes], Ask], body: bytes) -> int:
        """Tokens of the prompt of a request, as a conversation of its own would have it. Raises ApiError."""
        if not self.gateway.engines.names:
            raise ApiError(404, "The tokens of an upstream's prompts are not counted here", code="not_found")
        try:
            return await run_aside(len(body), self._count_tokens, parse, body)
        except RenderError as error:
            raise _unwritten(error, "messages") from error

    def _count_tokens(self, parse: Callable[[bytes], Ask], body: bytes) -> int:
        request = parse(body)
        policy, _ = parse_model(self.gateway.engines.names, request.model)
        renderer = self.gateway.engines.of(policy or self.gateway.options.policy).renderer
        return len(renderer.render(messages_of(request.turns), request.tools, template_options(body)))


def _unwritten(error: RenderError, asked_in: str) -> ApiError:
    """The template does not write these messages, or the context does not hold them."""
    if isinstance(error, PromptTooLong):
        return too_long(asked_in)
    return ApiError(400, str(error), param=asked_in, code="unsupported_messages")


def _no_engine(error: EngineError) -> ApiError:
    """No engine could be given the call: the client may try again."""
    logger.warning("no engine for a call: %s", error)
    return ApiError(503, str(error), type="server_error", code="no_engine", retry_after_s=1)
