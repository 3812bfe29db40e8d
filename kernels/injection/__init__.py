"""Adjacent injection: the gated message of every slot's predecessor. The write is an epilogue of `dspine_kernels.linear`, or
`dspine_kernels.rows.write_and_norm`."""

from dspine_kernels.injection.kernel import gated_messages
from dspine_kernels.injection.projected import gate_projections
from dspine_kernels.injection.reference import gated_messages_reference

__all__ = ["gate_projections", "gated_messages", "gated_messages_reference"]
