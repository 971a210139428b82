"""A server that clients of a soak send to."""

from bench.soak.ledger import Ledger


class Target:
    """One server, and the counts of the requests that clients sent since it was last started."""

    def __init__(self, name: str, base_url: str) -> None:
        self.name = name
        self.base_url = base_url
        self.ledger = Ledger()
        self.earlier: list[Ledger] = []  # of its processes that were killed
        self.is_up = True  # not between its kill and the moment when it is ready again
