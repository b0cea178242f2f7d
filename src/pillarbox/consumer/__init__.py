"""The consumer: reads messages from a broker and gives their events to handlers, in order per key."""

from pillarbox.consumer.consumer import Consumer
from pillarbox.consumer.decoder import Decoder, Ids, decode, make_decoder
from pillarbox.consumer.supervisor import State

__all__ = ["Consumer", "Decoder", "Ids", "State", "decode", "make_decoder"]
