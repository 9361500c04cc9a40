"""What the algorithms with many forms choose among: COSMA's grids and T10's points."""
