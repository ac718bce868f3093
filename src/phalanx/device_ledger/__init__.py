"""The ledger of a machine's simulated devices: how many bytes of each which process holds.

One file that all of them share. A device has a budget, and what does not fit into it is refused as a
device refuses it, out of memory. Every entry belongs to a process, which alone writes it: entries of
those that have ended count no more, however they ended, so that a process which is killed at any
byte of a change leaves a ledger that is right.
"""

from phalanx.device_ledger.ledger import DeviceLedger, DeviceMemory, SimulatedDevice
from phalanx.device_ledger.ledger_file import MIB, Holding

__all__ = ["MIB", "DeviceLedger", "DeviceMemory", "Holding", "SimulatedDevice"]
