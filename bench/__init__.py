"""Measurements beside other software and against the hardware; run from the root of the repository as `python -m bench.NAME`.

Nothing of the package needs these modules. Programs that run in another project's environment import nothing of ours.
"""
