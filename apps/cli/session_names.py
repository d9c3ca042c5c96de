"""Sessions by the name that an agent's clients gave them, which the gateway alone knows: no topic holds it."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

from millrace.apps.cli.context import complain
from millrace.infra.config import Settings
from millrace.infra.local_keys import workers_key

PATIENCE_S = 2.0
"""for the gateway's answer"""


def newest_session(settings: Settings, name: str) -> str | None:
    """The id of the newest session of a name, said on standard error; None where no gateway that answers knows it."""
    ids = list(dict.fromkeys(id for key in _keys(settings) for id in _session_ids(settings, name, key)))
    if not ids:
        return None
    text = ids[-1] if len(ids) == 1 else f"{ids[-1]}, the newest of {', '.join(ids)}"
    complain.print(f"{name} is a name: of session {text}", highlight=False, markup=False, soft_wrap=True)
    return ids[-1]


def _keys(settings: Settings) -> list[str]:
    """One of each tenant; without any the gateway asks for none."""
    by_tenant = {key.tenant: key.key.get_secret_value() for key in settings.gateway.keys.values()}
    return [*by_tenant.values(), workers_key(settings) or "none"]


def _session_ids(settings: Settings, name: str, key: str) -> Iterator[str]:
    """Ids that the gateway gives this key's tenant for a name; none from a gateway that does not answer."""
    query = urllib.parse.urlencode({"name": name})
    url = f"http://{settings.gateway.host}:{settings.gateway.port}/v1/sessions?{query}"
    try:
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            sessions = json.loads(answer.read())["sessions"]
            yield from (str(one["session"]) for one in sessions)
    except (OSError, ValueError, LookupError, TypeError):
        return
