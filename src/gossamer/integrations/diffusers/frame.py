"""What the attention call that is now being made belongs to.

diffusers gives a dispatch backend nothing but q, k, v and a mask, so the rest goes past it, per
thread. Inside `torch.compile` the frame is written and read while tracing only: what is read there
is an operator's input (a tensor, guarded on its metadata) or the same for all layers.

The frame's attributes, each absent or None where there is nothing to say:

* `grid`: int64 [3] on the CPU, the (frames, rows, columns) of the forward that is running.
* `site`: int64 scalar on the CPU, the number of the attention module that is running; None for a
  module that is not attached to.
* `previous`: the dispatch backend that the running processor had before it was attached to.
* `used`: whether the running processor has reached the operator.
"""

from __future__ import annotations

import threading

# Not a subclass with defaults: Dynamo replays writes to a plain threading.local only.
FRAME = threading.local()
