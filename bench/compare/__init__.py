"""Two versions of rma_mm measured in turn on the same machine."""
