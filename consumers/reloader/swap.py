"""Bring one version into one engine: pause, load, reset the prefix cache, set the label, acknowledge, resume.

Invariants: from before the load until it has succeeded the engine's label names no version, so whatever it might
sample then is never trained; nothing is resumed unless load, reset and label have succeeded; a start of the engine is
never labelled by what another start loaded; every step may be
repeated, so a reloader killed anywhere in between leaves an engine that the next one finishes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, retry_if_result, stop_after_attempt, wait_fixed

from millrace.infra import faults
from millrace.infra.engines.control import EngineControl, PauseMode
from millrace.infra.errors import EngineUnavailable, ReloadError
from millrace.schemas.labels import LOADING

log = logging.getLogger(__name__)

RESETS = 5
RESET_WAIT_S = 0.05


async def freeze(control: EngineControl, mode: PauseMode = "keep") -> None:
    """Stop sampling and take the label away. What fails here has not touched the weights."""
    await control.pause(mode)
    faults.point("reloader.after_pause")
    await control.set_version(LOADING)
    faults.point("reloader.after_freeze")


async def swap(
    control: EngineControl,
    load: Callable[[], Awaitable[None]],
    label: str,
    acknowledge: Callable[[], Awaitable[None]],
) -> None:
    """Make a frozen engine serve the weights that `load` puts into it as `label`. Whatever is raised leaves it paused,
    its weights undefined until a load succeeds."""
    start = (await control.state()).incarnation
    await load()
    faults.point("reloader.after_load")
    await _reset(control)
    faults.point("reloader.after_reset")
    if (await control.state()).incarnation != start:
        raise EngineUnavailable(f"{control.url} restarted while its weights were loaded")
    await control.set_version(label)
    faults.point("reloader.before_acknowledge")
    await acknowledge()
    faults.point("reloader.after_acknowledge")
    await control.resume()
    faults.point("reloader.after_resume")


async def _reset(control: EngineControl) -> None:
    """Forget the old weights' keys; give up the frozen requests rather than sample them from a mixture."""
    if await _try_reset(control):
        return
    log.warning("%s holds on to its prefix cache: aborting the requests in flight", control.url)
    await control.abort()
    if not await _try_reset(control):
        raise ReloadError(f"{control.url} does not reset its prefix cache: restart it")


async def _try_reset(control: EngineControl) -> bool:
    trying = AsyncRetrying(
        retry=retry_if_result(lambda done: not done),
        stop=stop_after_attempt(RESETS),
        wait=wait_fixed(RESET_WAIT_S),
        retry_error_callback=lambda _: False,
    )
    return bool(await trying(control.reset_prefix_cache))
