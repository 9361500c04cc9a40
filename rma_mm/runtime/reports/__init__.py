"""Reports of products: timelines of all ranks, and pages of HTML."""
