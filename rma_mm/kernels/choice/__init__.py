"""Which kernel does a local product, and how fast each is here."""
