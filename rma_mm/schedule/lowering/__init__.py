"""From a row and a problem to operations: how boxes are cut, walked and fetched, alone, by node and by group."""
