"""The Triton kernels and their launchers, one module per operation. These need Triton; nothing else imports it."""
