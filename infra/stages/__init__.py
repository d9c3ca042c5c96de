"""The stages' contract (`base`), and the runner that makes any stage live and exactly once over any bus.

state    what one slot knows, and the changelog that restores it
marks    high-water marks of numbered sources: the duplicates a slot skips
fold     a turn as a pure function: records and a time in, emits and changes out; what cannot be folded set aside
outbox   emits to bytes: encoding, claims, places of one emit inside another
slot     one slot: fence, restore, turn, commit
live     all slots of one process: membership, polling, restoring after a refusal
replay   recorded turns folded again and compared
"""
