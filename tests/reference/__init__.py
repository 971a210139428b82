"""The published algorithms written as plainly as possible: the oracle for the optimised cache and backend.

Nothing here is shared with the code under test. Tokens are objects in Python lists, loops run over heads and
entries, a prompt is read in one piece, and the ring is a list with a cursor instead of a formula.
"""
