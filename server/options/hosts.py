"""Which names and addresses lead to the machine itself."""

import ipaddress


def is_this_machine(name: str) -> bool:
    """Return whether a name or an address, without a port, leads to the machine itself everywhere."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
