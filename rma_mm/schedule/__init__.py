"""What happens when: operations on regions in global coordinates, how rows become operations, and their readers."""
