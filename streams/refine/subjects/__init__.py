"""Who a text is about: the registry of a tenant's subjects and their identifiers."""
