"""What works on this machine, what is missing, what is broken, and what to do about it."""

from dspine_export.doctor.check import Check
from dspine_export.doctor.examine import examine

__all__ = ["Check", "examine"]
