"""Dispatch: prompts, completions and versions in; grants and the order of learning out. The only writer of both.

Invariants (`tests/properties`):

- Tickets are dense, and so are seqs; each ticket is resolved once; granted = ready + negative + outstanding.
- (I1) and (J) of `admission` hold after every record, so under `reserve` no trained token is older than eta versions
  and nothing is dropped.
- Only dispatch expires a ticket, in log time: the least time over all slots of seal, so that no backlog makes a lease
  pass. Until every slot has spoken, and version 0 exists, nothing is granted.
- A group whose oldest token is older than its grant allowed is rejected: the proof rests on min_version.
- Under dynamic sampling a group whose rewards are all equal is rejected, so its room is granted again: batches keep B.
- What comes for a ticket that is resolved is a dead letter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from millrace.infra.log.base import Record
from millrace.infra.log.blobs import ClaimStore
from millrace.infra.log.topics import logical_name, stages_of
from millrace.infra.stages.base import Clear, Emit, HeaderName, Op, Stage, View, Wake, require
from millrace.schemas.ids import Micros
from millrace.schemas.limits import beyond
from millrace.schemas.records import (
    Completion,
    Decision,
    LedgerEntry,
    Prompt,
    Resolution,
    ResolutionKind,
    WeightVersion,
)
from millrace.streams.decoding import Decoder, Unreadable, dead_letter, place_of
from millrace.streams.dispatch import records, settings
from millrace.streams.dispatch.grants import EVEN, is_even, may_admit, may_grant
from millrace.streams.dispatch.release_policies import POLICIES, ReleaseCandidate
from millrace.streams.dispatch.settings import Change
from millrace.streams.dispatch.state import (
    ASK,
    ASKS,
    BOOK,
    BOOKS,
    CLOCK,
    CLOCKS,
    EARLIES,
    EARLY_KEY,
    HELD_TICKETS,
    LINE,
    RULE_SETS,
    RULES,
    TICKETS,
    Advance,
    Book,
    QueuedPrompt,
    SettingsInForce,
    Ticket,
    held_key,
    line_key,
    ticket_key,
)

Handler = Callable[[View, Record, Any, Micros], Iterator[Op]]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a policy begins; later changes come by `decisions`. B, eta and the group size come with version 0."""

    release: str = "reserve"
    unsolicited_share: float = 0.0
    lease: Micros = 300_000_000
    reward_deadline_ms: int = 60_000
    awaits: tuple[str, ...] = ()
    """reward sources of prompts that name none"""
    max_running: int = 0
    dynamic_sampling: bool = False
    retries: int = 1
    """how often the prompt of an expired ticket is granted again, under a new ticket"""


class Dispatch(Stage):
    """The one dispatcher of a policy. `slots` is N: partitions of `grants` and slots of seal."""

    def __init__(self, policy: str, slots: int, terms: Terms | None = None, claims: ClaimStore | None = None) -> None:
        self.name = stages_of(policy)["dispatch"]
        self._policy = policy
        self._slots = slots
        self._terms = terms or Terms()
        self._decode = Decoder(claims)
        self.primary = f"{policy}.completions"
        self.sides = (f"{policy}.prompts", f"{policy}.ledger", f"{policy}.weights", "decisions")
        self._handlers: dict[str, tuple[str, Handler]] = {
            self.primary: ("Completion", self._completion),
            f"{policy}.prompts": ("Prompt", self._prompt),
            f"{policy}.ledger": ("LedgerEntry", self._ledger),
            f"{policy}.weights": ("WeightVersion", self._weights),
            "decisions": ("Decision", self._decision),
        }

    def time_of(self, view: View, record: Record) -> Micros | None:
        if logical_name(record.topic) != self.primary:
            return None
        try:
            name, content = self._decode(record)
        except Unreadable:
            return None
        if name != "Completion":
            return None
        completion = cast(Completion, content)
        return _least(self._times(view, completion)) if 0 <= completion["slot"] < self._slots else None

    def on_record(self, view: View, record: Record, now: Micros) -> Iterable[Op]:
        record_name, handler = self._handlers[logical_name(record.topic)]
        try:
            name, content = self._decode(record)
        except Unreadable as error:
            yield self._letter(record, error.code, str(error), now)
            return
        if name != record_name:
            yield self._letter(record, "wrong_record", f"a {name} does not belong here", now)
            return
        refusal = beyond(name, content)
        if refusal is not None:
            yield self._letter(record, "out_of_bounds", refusal, now)
            return
        yield from handler(view, record, content, now)
        yield from self._move(view, now)

    def ids_of(self, view: View, what: Record | str) -> Mapping[str, object]:
        if isinstance(what, str):
            return {"policy": self._policy}
        return {"policy": self._policy, "group": self._decode(what)[1].get("group")}

    def on_wake(self, view: View, key: str, now: Micros) -> Iterable[Op]:
        table_key = TICKETS.match(key)
        ticket = view.get(table_key) if table_key else None
        if ticket is None or ticket["done"] is not None:
            return
        yield from self._resolve(view, ticket, "expired", now, "its lease ended")
        prompt = ticket["prompt"]
        if prompt["tries"] < self._terms.retries:
            yield from self._queue(view, {**prompt, "tries": prompt["tries"] + 1})
        yield from self._move(view, now)

    # -- records

    def _completion(self, view: View, record: Record, completion: Completion, now: Micros) -> Iterator[Op]:
        if completion["policy"] != self._policy or not 0 <= completion["slot"] < self._slots:
            yield self._letter(record, "wrong_record", "it is of another policy or slot", now, completion)
            return
        yield CLOCKS.put(CLOCK, self._times(view, completion))
        if completion["kind"] == "progress":
            return
        if view.get(BOOK) is None:
            yield self._letter(record, "no_version", "the policy has no version 0 yet", now, completion)
            return
        if completion["ticket"] is None:
            yield from self._admit(view, completion, now)
            return
        ticket = view.get(ticket_key(completion["ticket"]))
        if ticket is None:
            was_granted = 0 <= completion["ticket"] < self._book(view).granted
            code = "ticket_resolved" if was_granted else "unknown_ticket"
            yield self._letter(record, code, f"ticket {completion['ticket']} is not outstanding", now, completion)
        elif ticket["done"] is not None:
            yield self._letter(
                record, "duplicate_completion", "the ticket's group is complete already", now, completion
            )
        elif completion["size"] != ticket["size"]:
            yield self._letter(record, "wrong_size", f"the ticket is for {ticket['size']} samples", now, completion)
        elif completion["kind"] == "top_up":
            yield from self._top_up(ticket, completion, now)
        elif completion["kind"] == "short":
            yield from self._resolve(view, ticket, "failed", now, completion["reason"], completion)
        elif completion["v_head"] < ticket["min_version"]:
            reason = f"version {completion['v_head']} is below min_version {ticket['min_version']}"
            yield from self._resolve(view, ticket, "rejected", now, reason, completion)
        elif self._rules(view).dynamic_sampling and is_even(completion["rewards"]):
            yield from self._resolve(view, ticket, "rejected", now, EVEN, completion)
        else:
            yield from self._complete(view, ticket, completion, now)

    def _prompt(self, view: View, record: Record, prompt: Prompt, now: Micros) -> Iterator[Op]:
        book = view.get(BOOK)
        if book is None:
            yield EARLIES.append(EARLY_KEY, ("prompt", prompt))
        elif prompt["number"] <= book["prompt"]:
            yield self._letter(record, "duplicate_prompt", f"prompt {prompt['number']} was seen before", now)
        else:
            yield from self._enqueue(view, prompt)

    def _ledger(self, view: View, record: Record, entry: LedgerEntry, now: Micros) -> Iterator[Op]:
        advance: Advance = {"version": entry["version"], "seq_hi": entry["seq_hi"]}
        if view.get(BOOK) is None:
            # Version 0 comes in both topics at once; its B and eta are in `weights`, which is read on its own.
            yield EARLIES.append(EARLY_KEY, ("ledger", advance))
            return
        yield from self._advance(view, advance)

    def _weights(self, view: View, record: Record, version: WeightVersion, now: Micros) -> Iterator[Op]:
        if version["version"] != 0 or view.get(BOOK) is not None:
            return
        terms = self._terms
        rules = SettingsInForce(
            sizes=[[0, version["batch"] or 1]],
            eta=version["eta"] or 0,
            release=terms.release,
            next_release=None,
            unsolicited_share=terms.unsolicited_share,
            lease=terms.lease,
            max_running=terms.max_running,
            dynamic_sampling=terms.dynamic_sampling,
            group_size=version["group_size"] or 1,
        )
        yield BOOKS.put(BOOK, Book(0, 0).to_values())
        yield RULE_SETS.put(RULES, rules.to_values())
        for change in settings.first(rules):
            yield self._setting(change, None, "as the policy began", now)
        for kind, item in view.items(EARLY_KEY):
            match kind:
                case "prompt":
                    yield from self._enqueue(view, cast(Prompt, item))
                case "ledger":
                    yield from self._advance(view, cast(Advance, item))
                case _:
                    yield from self._ask(view, cast(Decision, item), now)
        yield Clear(EARLY_KEY)

    def _decision(self, view: View, record: Record, decision: Decision, now: Micros) -> Iterator[Op]:
        if decision["kind"] != "setting" or decision["policy"] not in (None, self._policy):
            return
        if decision["name"] in settings.OTHER_SETTINGS:
            return
        _, refusal = settings.parse(decision["name"], decision["value"])
        if refusal is not None:
            yield self._letter(record, "bad_setting", refusal, now)
        elif view.get(BOOK) is None:
            yield EARLIES.append(EARLY_KEY, ("decision", decision))
        else:
            yield from self._ask(view, decision, now)

    # -- steps

    def _enqueue(self, view: View, prompt: Prompt) -> Iterator[Op]:
        book = self._book(view)
        if prompt["number"] <= book.prompt:
            return
        yield BOOKS.put(BOOK, replace(book, prompt=prompt["number"]).to_values())
        awaits = list(prompt["awaits"]) or list(self._terms.awaits)
        size = prompt["group_size"]
        yield from self._queue(
            view, {"id": prompt["id"], "task": prompt["task"], "size": size, "awaits": awaits, "tries": 0}
        )

    def _queue(self, view: View, prompt: QueuedPrompt) -> Iterator[Op]:
        book = self._book(view)
        first, following = book.line
        yield LINE.put(line_key(following), {**prompt})
        yield BOOKS.put(BOOK, replace(book, line=(first, following + 1)).to_values())

    def _advance(self, view: View, entry: Advance) -> Iterator[Op]:
        book = self._book(view)
        if entry["version"] > book.version:
            yield BOOKS.put(BOOK, book.advance(entry["version"], entry["seq_hi"]).to_values())

    def _ask(self, view: View, decision: Decision, now: Micros) -> Iterator[Op]:
        value, _ = settings.parse(decision["name"], decision["value"])
        rules, change = settings.ask(decision["name"], value, self._book(view), self._rules(view))
        yield RULE_SETS.put(RULES, rules.to_values())
        if change is not None:
            yield self._setting(change, decision["id"], decision["reason"], now)
        elif rules.next_release is not None:
            yield ASKS.put(ASK, (decision["id"], decision["reason"]))

    def _top_up(self, ticket: Ticket, completion: Completion, now: Micros) -> Iterator[Op]:
        lease = ticket["lease_until"] - ticket["granted_at"]
        next_round: Ticket = {**ticket, "round": ticket["round"] + 1, "lease_until": now + lease, "granted_at": now}
        yield from self._grant(next_round, completion["missing"], now)

    def _complete(self, view: View, ticket: Ticket, completion: Completion, now: Micros) -> Iterator[Op]:
        """Hold it; `_move` gives it its seq, now or later."""
        key = ticket_key(ticket["ticket"])
        yield BOOKS.put(BOOK, self._book(view).completing().to_values())
        yield TICKETS.put(key, {**ticket, "done": {**completion}})
        yield Wake(key, None)
        yield HELD_TICKETS.put(held_key(ticket["deadline"], ticket["ticket"]), ticket["ticket"])

    def _admit(self, view: View, completion: Completion, now: Micros) -> Iterator[Op]:
        book, rules = self._book(view), self._rules(view)
        deadline = completion["v_head"] + rules.eta
        refusal = may_admit(book, rules, rules.schedule(book), completion["v_head"], completion["v_tail"])
        if rules.dynamic_sampling and is_even(completion["rewards"]):
            refusal = EVEN
        if refusal is not None:
            yield self._resolution(
                records.resolution(
                    "declined", self._policy, now, completion=completion, deadline=deadline, reason=refusal
                )
            )
            return
        yield BOOKS.put(BOOK, book.admitting().to_values())
        yield self._resolution(
            records.resolution(
                "ready", self._policy, now, number=book.granted, seq=book.seq, completion=completion, deadline=deadline
            )
        )

    def _resolve(
        self,
        view: View,
        ticket: Ticket,
        kind: ResolutionKind,
        now: Micros,
        reason: str | None,
        completion: Completion | None = None,
    ) -> Iterator[Op]:
        """End a ticket that was still running, without a seq."""
        book = self._book(view).completing().resolving(ticket["deadline"], is_ready=False)
        yield BOOKS.put(BOOK, book.to_values())
        yield Clear(ticket_key(ticket["ticket"]))
        yield self._resolution(
            records.resolution(kind, self._policy, now, ticket=ticket, completion=completion, reason=reason)
        )

    def _move(self, view: View, now: Micros) -> Iterator[Op]:
        """Release and grant until nothing more may be."""
        if view.get(BOOK) is None:
            return
        yield from self._release(view, now)
        rules, change = settings.settle(self._book(view), self._rules(view))
        if change is not None:
            decision, reason = view.get(ASK) or (None, None)
            yield RULE_SETS.put(RULES, rules.to_values())
            yield Clear(ASK)
            yield self._setting(change, decision, reason, now)
        if now > 0:
            yield from self._grants(view, now)

    def _release(self, view: View, now: Micros) -> Iterator[Op]:
        rules = self._rules(view)
        policy = POLICIES[rules.release]
        for key in HELD_TICKETS.keys(view):
            book = self._book(view)
            ticket = require(view, ticket_key(require(view, key)))
            completion = cast(Completion, ticket["done"])
            group = ReleaseCandidate(ticket["deadline"], ticket["eta"], completion["v_head"], completion["v_tail"])
            answer = policy(group, book, rules.schedule(book))
            if answer == "hold":
                return
            is_ready = answer == "ready"
            yield BOOKS.put(BOOK, book.resolving(ticket["deadline"], is_ready=is_ready).to_values())
            yield Clear(key)
            yield Clear(ticket_key(ticket["ticket"]))
            yield self._resolution(
                records.resolution(
                    answer,
                    self._policy,
                    now,
                    ticket=ticket,
                    seq=book.seq if is_ready else None,
                    reason=None if is_ready else f"too old for batch {rules.schedule(book).batch_of(book.seq)}",
                )
            )

    def _grants(self, view: View, now: Micros) -> Iterator[Op]:
        rules = self._rules(view)
        while True:
            book = self._book(view)
            first, following = book.line
            if first == following or not may_grant(book, rules, rules.schedule(book)):
                return
            prompt = require(view, line_key(first))
            deadline = book.version + rules.eta
            ticket: Ticket = {
                "ticket": book.granted,
                "prompt": prompt,
                "size": prompt["size"] or rules.group_size,
                "min_version": book.version,
                "deadline": deadline,
                "eta": rules.eta,
                "granted_at": now,
                "lease_until": now + rules.lease,
                "round": 0,
                "done": None,
            }
            yield Clear(line_key(first))
            yield BOOKS.put(BOOK, replace(book.granting(deadline), line=(first + 1, following)).to_values())
            yield from self._grant(ticket, range(ticket["size"]), now)

    def _grant(self, ticket: Ticket, samples: Iterable[int], now: Micros) -> Iterator[Op]:
        key, number = ticket_key(ticket["ticket"]), ticket["ticket"]
        yield TICKETS.put(key, ticket)
        yield Wake(key, ticket["lease_until"])
        grant = records.grant(self._policy, ticket, list(samples), self._terms.reward_deadline_ms, now)
        headers: dict[HeaderName, str] = {"ticket": str(number), "policy": self._policy, "round": str(ticket["round"])}
        yield Emit(
            f"{self._policy}.grants", str(number), "Grant", grant, partition=number % self._slots, headers=headers
        )

    # -- small things

    def _book(self, view: View) -> Book:
        values = require(view, BOOK)
        return Book.read(values)

    def _rules(self, view: View) -> SettingsInForce:
        values = require(view, RULES)
        return SettingsInForce.read(values)

    def _times(self, view: View, completion: Completion) -> list[int]:
        """The newest time of each slot of seal, this record's included; 0 for one that has not spoken."""
        clock = view.get(CLOCK)
        times = list(clock) if clock else [0] * self._slots
        times[completion["slot"]] = max(times[completion["slot"]], completion["time"])
        return times

    def _resolution(self, record: Resolution) -> Emit:
        fields: dict[HeaderName, str | int | None] = {
            "kind": record["kind"],
            "group": record["group"],
            "policy": record["policy"],
            "ticket": record["ticket"],
            "seq": record["seq"],
        }
        headers = {name: str(value) for name, value in fields.items() if value is not None}
        key = record["group"] or str(record["ticket"])
        return Emit(f"{self._policy}.resolutions", key, "Resolution", record, headers=headers)

    def _setting(self, change: Change, decision: str | None, reason: str | None, now: Micros) -> Emit:
        record = records.setting(self._policy, change, decision, reason, now)
        headers: dict[HeaderName, str] = {"kind": "setting", "policy": self._policy}
        return Emit(f"{self._policy}.resolutions", f"setting/{change.name}", "Resolution", record, headers=headers)

    def _letter(
        self, record: Record, code: str, detail: str, now: Micros, completion: Completion | None = None
    ) -> Emit:
        ids = {"policy": self._policy, "group": completion["group"] if completion else None}
        key = record.key.decode("utf-8", "replace")
        return dead_letter(self.name, place_of(record), code, detail, now, key=key, event=ids)


def _least(times: list[int]) -> Micros | None:
    """Dispatch's time: the least over seal's slots, none until all have spoken."""
    return min(times) or None
