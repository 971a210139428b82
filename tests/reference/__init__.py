"""The published algorithms once more, as plainly as they can be written: what the tests hold the optimised cache and backend against.

Nothing here is shared with the floors under test. Tokens are objects in Python lists, heads and entries are walked in loops, a prompt is
read in one piece, and the ring is a list with a cursor instead of a formula.
"""
