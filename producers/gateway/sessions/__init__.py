"""The sessions of a gateway: what belongs to which, what each said, and its events in the capture log."""
