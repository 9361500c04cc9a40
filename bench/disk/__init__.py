"""Products of matrices that stay in files, beside the disk's rate, and beside Dask and Blosc2."""
