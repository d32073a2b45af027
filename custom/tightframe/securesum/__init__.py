"""The secure sum: pure state machines over bytes and numpy.

Nothing here imports torch, the engine or any other part of Tightframe, so that the protocol can
be audited by itself.
"""
