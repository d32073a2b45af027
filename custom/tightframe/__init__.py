"""Tightframe: privacy-hardened federated learning for hospitals, on NVIDIA FLARE.

Everything that leaves a silo is a term of a sum. The package is importable without torch;
only the parts that compute with tensors import it.
"""

__version__ = "0.1.0"
