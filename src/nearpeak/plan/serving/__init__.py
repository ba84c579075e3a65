"""Serving: prefill, decode, the KV cache, and latency against load."""
