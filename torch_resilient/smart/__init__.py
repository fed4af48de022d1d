"""SMART: training over links that drop packets, which repairs only what matters.

`smart_hook` and `smart_reduce_scatter` send gradients with error feedback, for DDP and FSDP2;
`SmartOptions` says what may be dropped, for them and for pipeline schedules; `tolerate` and
`zero_filled` are the same for a program's own sends.
"""

from torch_resilient.smart.ddp import (
    SmartReduceScatter,
    SmartState,
    smart_hook,
    smart_reduce_scatter,
)
from torch_resilient.smart.guard import SmartStatistics
from torch_resilient.smart.options import SmartOptions
from torch_resilient.smart.recovery import tolerate, zero_filled

__all__ = [
    "SmartOptions",
    "SmartReduceScatter",
    "SmartState",
    "SmartStatistics",
    "smart_hook",
    "smart_reduce_scatter",
    "tolerate",
    "zero_filled",
]
