"""Choose the kernel of a local product, and measure how fast each is here."""
