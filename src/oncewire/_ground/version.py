"""The version, in one place: the package, the command line and the greeting to NATS read it here."""

VERSION = "0.2.0"
