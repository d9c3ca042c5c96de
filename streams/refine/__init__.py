"""Governance before learning: the stage that turns captured events into the history.

stage      the fold: validate, check, govern, chain
validate   is it an event at all, and is it where it belongs
custody    the gateway's chain and the dense steps of each trajectory
leaves     the strings inside a body, and a body with some of them replaced
redact     what the detectors found, taken out; what must not be learned, withheld
tenancy    what a tenant allows
detectors  what finds secrets and personal data
"""
