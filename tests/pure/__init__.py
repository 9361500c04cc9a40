"""Tests that need no rank but the one pytest runs on."""
