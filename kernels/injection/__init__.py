"""Adjacent injection: the gated message of every slot's predecessor. The write is `dspine_kernels.rows.write_and_norm`."""

from dspine_kernels.injection.kernel import gated_messages
from dspine_kernels.injection.reference import gated_messages_reference

__all__ = ["gated_messages", "gated_messages_reference"]
