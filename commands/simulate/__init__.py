"""`snapserve simulate`: plans, sweeps, replays and published figures on simulated machines.

Every output says that it is simulated.
"""

from commands.simulate.command import NAME, SUMMARY, configure, run

__all__ = ["NAME", "SUMMARY", "configure", "run"]
