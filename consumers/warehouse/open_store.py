"""The store that the settings name, with its tables as this release wants them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from millrace.consumers.warehouse.questions import views
from millrace.consumers.warehouse.store.base import Store
from millrace.consumers.warehouse.store.directory import TableDirectory
from millrace.consumers.warehouse.store.migrations import migrate
from millrace.consumers.warehouse.store.owner import claim, take
from millrace.consumers.warehouse.store.retention import keep
from millrace.consumers.warehouse.store.server import Server
from millrace.infra.config import Settings
from millrace.infra.errors import WarehouseError


def open_store(settings: Settings, answers_at: str = "") -> Store:
    """Open the server of `[warehouse] url`, else the directory. answers_at: the URL at which this process will answer
    queries. Raises WarehouseHeld when another process has the directory, WarehouseError when it cannot be opened, or
    where a server has another namespace's tables."""
    url = settings.warehouse.url.get_secret_value()
    if not url:
        return TableDirectory(settings.warehouse_home, memory_mb=settings.warehouse.memory_mb, url=answers_at)
    with ExitStack() as resources:
        server = resources.enter_context(Server(url))
        claim(server, settings.namespace)
        resources.pop_all()
    return server


def open_for_rows(settings: Settings, answers_at: str = "") -> Store:
    """As `open_store`, with every table and view as this release wants it, for who brings rows in. Raises
    WarehouseError for tables of a newer release."""
    with ExitStack() as resources:
        store = resources.enter_context(open_store(settings, answers_at))
        migrate(store)
        views.install(store)
        keep(store, settings.warehouse.keep_days, settings.topics.short_hours)
        resources.pop_all()
    return store


def take_server(settings: Settings, rivals: Collection[str]) -> dict[str, int]:
    """Make the tables of `[warehouse] url` this namespace's alone; gives the records that went, by namespace. Raises
    WarehouseError where there is no server, or where its tables hold rows of a namespace that is not among `rivals`."""
    if not (url := settings.warehouse.url.get_secret_value()):
        raise WarehouseError(
            "[warehouse] url is empty, and tables in a directory are one deployment's: nothing to take"
        )
    with Server(url) as server:
        return take(server, settings.namespace, rivals)


def make_tables(store: Store) -> None:
    """Every table as this release wants it, kept for ever, and the views."""
    migrate(store)
    views.install(store)
