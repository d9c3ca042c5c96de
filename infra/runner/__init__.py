"""The runner: makes any `infra.stage.Stage` live and exactly-once over any `infra.bus.base.Bus`.

state    what one slot knows, and the changelog that restores it
marks    high-water marks of numbered sources: the duplicates a slot skips
fold     a turn as a pure function: records and a time in, emits and changes out
outbox   emits to bytes: encoding, claims, places of one emit inside another
slot     one slot: fence, restore, turn, commit
live     all slots of one process: membership, polling, restoring after a refusal
replay   recorded turns folded again and compared
"""
