"""Layers: each an op in three functions, ``op``, ``op_forward -> (out, saved)``, ``op_backward(dout, saved)``."""
