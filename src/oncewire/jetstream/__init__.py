"""The way to NATS: one client for publishing, pulling, requests, direct reads, key-value and the control plane."""

from oncewire.jetstream.client import Client, connect
from oncewire.jetstream.keyvalue import Entry, KeyValue
from oncewire.jetstream.options import Options, State, options_from
from oncewire.jetstream.protocol import Message
from oncewire.jetstream.publish import Outgoing, PubAck
from oncewire.jetstream.pull import Delivery, Pull, parse_reply
from oncewire.jetstream.reader import Reader, Start
from oncewire.jetstream.stored import StoredMessage
from oncewire.jetstream.wire import ServerInfo

__all__ = [
    "Client",
    "Delivery",
    "Entry",
    "KeyValue",
    "Message",
    "Options",
    "Outgoing",
    "PubAck",
    "Pull",
    "Reader",
    "ServerInfo",
    "Start",
    "State",
    "StoredMessage",
    "connect",
    "options_from",
    "parse_reply",
]
