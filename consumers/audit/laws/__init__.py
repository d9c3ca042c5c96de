"""The laws of the audit, by what they are about.

records       all records: where topics begin, what can be read, places, time
versions      weight events and ledger: dense, tiling the order, chained; the selection of a branch
weights       what weight events say of their files, and the files
ledger        the figures of entries, and who trained
scores        evaluations
order         seqs, tickets and settings
agreements    what grants, completions and resolutions say of the same group
samples       tokens, staleness, eligibility of what was trained on
turns         what stages folded and wrote
events        envelopes and hash chains
dispositions  what became of every raw event
episodes      what became of every episode
"""
