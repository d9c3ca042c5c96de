"""Governance before learning: the stage that turns captured events into the history.

stage      the fold: validate, check, govern, chain
validate   is it an event at all, and is it where it belongs
custody    the gateway's chain and the dense steps of each trajectory
strings    every string of an event by its schema: texts and names
documents  JSON text as a row of tokens
leaves     what detectors read: one buffer, and which bytes of it belong to which string
sweep      hits against leaves, in one pass
forms      encoded text, decoded before detectors read it
names      what takes the place of a name that holds a secret
redact     what the detectors found, taken out; what must not be learned, withheld
personal   fields that the schema of a tool marks
subjects   who a text is about, by the tenant's registry
tenancy    what a tenant allows
detectors  what finds secrets and personal data
"""
