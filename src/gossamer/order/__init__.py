"""In which order the tiles of a plan are launched: the same work, other cache traffic."""

from gossamer.order.base import Order, OrderDecision, get_order, list_orders
from gossamer.order.wavealign import WaveAlign

__all__ = ["Order", "OrderDecision", "WaveAlign", "get_order", "list_orders"]
