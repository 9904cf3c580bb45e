"""Who may do what: keys and tokens in, a Principal out. The front asks at every request; parts only see Principals."""

from oncewire._ground.trust.gate import Gate, open_gate
from oncewire._ground.trust.grants import ACTIONS, check_grants

__all__ = ["ACTIONS", "Gate", "check_grants", "open_gate"]
