"""Calibration: the figures of this machine, measured with the windows, channels and kernels that products use.

`measure.measure` measures all that it is asked for. `machine_of` gives the machine for a kind of product: the one that
the user named, the one that is kept from earlier, or one that is measured in a moment. `remember_correction` adds what
products turned out to take. The laws are those of `rma_mm.policy.model.machine`.
"""

from rma_mm.runtime.calibration.lookup import machine_of, remember_correction

__all__ = ["machine_of", "remember_correction"]
