"""Is a product right? Checked on the distributed matrices, without gathering any."""
