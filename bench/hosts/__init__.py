"""A cluster on one machine: hosts in namespaces of their own, joined by links of a limited rate."""

from bench.hosts.cluster import Cluster
from bench.hosts.namespaces import ClusterError, obstacle

__all__ = ["Cluster", "ClusterError", "obstacle"]
