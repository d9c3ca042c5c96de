"""How large anything that enters may be: one number a kind of thing, for every door (gateway, refine, stages, files).

Invariant: what is within these bounds can be folded, stored in a changelog and encoded by every later stage; what is
beyond one is refused at the door with the bound's number, or becomes a dead letter where there is no one to refuse.
`docs/limits.md` lists them.
"""

from __future__ import annotations

INT = 2**31 - 1
"""counts, sizes and indexes that clients send: from -INT to INT"""
SEED = 2**63 - 1
"""seeds of sampling, what 64 bits hold: from -SEED - 1 to SEED"""
NAME_BYTES = 1024
"""UTF-8 bytes of a name: task id, attempt, group, source, label, tool name, call id"""
NAMES = 256
"""entries of one list or map of names: awaited sources, labels, components, versions of tools"""
DEPTH = 64
"""nesting of lists and maps in a JSON value that is looked into"""
GROUP_SIZE = 4096
"""samples of one group"""
WAIT_MS = 30 * 24 * 3600 * 1000
"""milliseconds a group or an episode may wait for anything: 30 days"""
REWARD = 1e6
"""absolute value of a reward or of one of its components"""
REWARDS = 1024
"""rewards that one episode keeps; later ones are dead letters"""
LEAVES = 100_000
"""strings and numbers of one event that are scanned; an event with more is blanked, never passed unread"""
TABLE_BYTES = 64 * 2**20
"""bytes of the table of a weight delta, and of the header of a tensor file"""
HITS = 10_000
"""findings in one event beyond which it is blanked"""
TIME = 2**53
"""micros since the epoch of any time: the year 2255, exact as a float too"""
VERSION = 2**53
"""versions, tickets, seqs and numbers of prompts: dense counters that nobody reaches, exact as a float too"""
BATCH = 2**20
"""groups of one training batch"""
ETA = 1024
"""versions that a trained token may be old at most, whatever a policy asks for"""
ATTEMPTS = 2 * GROUP_SIZE
"""attempts that may begin in one group; later ones are dead letters"""
VALUES = 100_000
"""values of one JSON body at the gateway: maps, lists, their entries and the names in maps"""
EVENTS = 1024
"""events that one request may report"""
REPORT_BYTES = 2 << 20
"""bytes of one request to `/v1/sessions` and below it: a start, events, a reward, an end"""
CHOICES = 128
"""replies that one call may ask for"""
STOPS = 16
"""stop strings of one call"""
SCHEMA_BYTES = 64 << 10
"""bytes of what one call's reply is held to: schemas as ASCII JSON, of all its tools where these are forced"""
PATTERNS = 8
"""regular expressions in what one call's reply is held to: an engine takes seconds over some of them"""
PATTERN_BYTES = 256
"""UTF-8 bytes of each"""
BIASES = 1024
"""tokens that the `logit_bias` of one call names"""
LOGPROBS = 2**17
"""log-probabilities that one call may ask for on the wire: choices times tokens times (1 + rivals)"""
CALLS = 256
"""tool calls of one reply that are read; a reply with more is kept as the text that it is"""
HEADER_BYTES = 64 << 10
"""bytes of the request line and headers of one HTTP request"""
OTLP_VALUES = 2**20
"""values of one OTLP request: messages, fields of messages, and what JSON calls so"""
OTLP_DEPTH = 256
"""nesting of one OTLP request; what its attributes say has `DEPTH` like any other JSON"""
ROW_BYTES = 32 << 20
"""bytes of one row of an imported file, and of all events that it becomes"""
REPLY_BYTES = 64 << 20
"""bytes of an upstream's whole answer, decompressed; of a stream any number pass"""
REFUSAL_BYTES = 1 << 20
"""bytes of an upstream's answer that is no success"""
EVENT_BYTES = 1 << 20
"""bytes of one event of an upstream's stream that are looked into, and held back until its end comes"""
PARTS = 1024
"""blocks or items of one reply that an upstream streams"""
SOCKET_IDLE_S = 600
"""seconds without a call after which a WebSocket is closed"""
