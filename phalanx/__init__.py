"""Phalanx trains transformer language models of any size on any number of devices."""

__version__ = "0.1.0"
