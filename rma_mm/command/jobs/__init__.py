"""The job of `rma-mm run`: reading, multiplying, checking, writing, reporting."""
