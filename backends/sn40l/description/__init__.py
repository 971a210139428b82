"""Machines and models as data, read from files."""
