"""The async client of rooms and token streams. `rules` decides, the rest acts; clients/js is its twin."""

from oncewire.gateway.client.actions import Limits, Missing, Page, Position
from oncewire.gateway.client.asynchronous import GatewayClient, Room
from oncewire.gateway.client.sse import Lifecycle, Token

__all__ = ["GatewayClient", "Lifecycle", "Limits", "Missing", "Page", "Position", "Room", "Token"]
