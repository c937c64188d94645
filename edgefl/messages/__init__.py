"""What nodes tell each other, and how it travels: the message base, the envelope codec, exact sizes."""

from edgefl.messages.base import Back, Gone, Message, field_names, payload_bytes
from edgefl.messages.codec import Codec, Encoded, Plan

__all__ = ["Back", "Codec", "Encoded", "Gone", "Message", "Plan", "field_names", "payload_bytes"]
