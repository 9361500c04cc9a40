"""Products by rma_mm beside what users would otherwise pick: `python -m bench.peers`."""
