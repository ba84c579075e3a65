"""Clusters and collectives: GPUs, the links and networks that join them, and how long NCCL takes over them."""
