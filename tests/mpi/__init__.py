"""Tests that run on real ranks; each is decorated with `tests.launch.parallel`."""
