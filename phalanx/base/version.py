"""The version of Phalanx."""

VERSION = "0.1.0"
