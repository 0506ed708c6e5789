"""What addresses say about where they lead."""


def is_loopback(address: str) -> bool:
    """Whether `address` is this host's own, so that nothing sent to it reaches a network."""
    return address == "localhost" or address.startswith("127.") or address == "::1"
