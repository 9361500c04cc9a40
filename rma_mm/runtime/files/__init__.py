"""`.npy` files: headers checked before anything is read, tiles read by their owners, output written beside its name."""
