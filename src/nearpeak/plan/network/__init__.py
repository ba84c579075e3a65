"""Clusters, and what collectives take on them."""
