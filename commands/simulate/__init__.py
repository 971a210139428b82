"""`snapserve simulate`: plans, sweeps, replays and published figures on simulated machines.

Every output says that it is simulated.
"""
