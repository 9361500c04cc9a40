"""Read remote data directly, or broadcast it? Measured in cells, and in the literature's own experiments."""
