"""Hosts: the memory and threads that one grants, and which ranks and hosts are gone."""
